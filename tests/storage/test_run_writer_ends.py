"""What a writer leaves that fails, is killed, or ends."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from nonet.errors import StorageError
from nonet.storage import RunWriter
from nonet.storage.node_cache import make_room
from tests.storage.memory_storage import MemoryStorage
from tests.storage.run_steps import CopyMaker, ViewMaker, list_objects, remove, save_checkpoint, write


@pytest.mark.parametrize("lost", [".", "scenario.yaml", ".writing", ".storage.json"])
def test_a_writer_whose_folder_was_emptied_stops_and_the_stored_run_stays(make_copy: CopyMaker, lost: str):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "scenario.yaml", "name: x")
    save_checkpoint(copy, writer, 10, "weights")
    before = dict(copy.storage.objects)  # pyright: ignore[reportAttributeAccessIssue]
    if lost == ".":
        shutil.rmtree(copy.path)
    else:
        (copy.path / lost).unlink()
    write(copy, "results/a.json", "1")
    with pytest.raises(StorageError, match="was deleted or emptied by another program while"):
        writer.commit()
    assert writer.commit_in_background() is False
    with pytest.raises(StorageError, match="nonet resume s3://feed-runs/run-1"):
        writer.close()
    assert copy.storage.objects == before  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "error",
    [StorageError("s3://feed-runs: the server does not answer"), OSError(28, "No space left on device")],
)
def test_commits_in_the_background_go_on_after_any_failure_and_report_it_once(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    monkeypatch.setattr("nonet.storage.run_writer.COMMIT_EVERY_S", 0.01)
    copy, failed = make_copy("a"), threading.Event()
    writer = RunWriter(copy)
    real_put = MemoryStorage.put

    def fail_once(storage: MemoryStorage, key: str, content: bytes) -> None:
        if not failed.is_set():
            failed.set()
            raise error
        real_put(storage, key, content)

    monkeypatch.setattr(MemoryStorage, "put", fail_once)
    write(copy, "results/a.json", "1")
    writer.start_commits()
    assert failed.wait(60)
    while not make_copy("b").read_tree().files:
        time.sleep(0.01)
    assert writer.describe_outage() == ""
    warning = writer.pop_warning()
    assert "1 commits failed, and are tried again: " in warning
    assert str(error) in warning
    assert writer.pop_warning() == ""
    writer.close()


def test_a_writer_whose_storage_fails_while_it_opens_leaves_the_folder_unlocked(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/a.json", "1")
    writer.close()
    other = make_copy("b")

    def fail(*_: object) -> None:
        raise StorageError("the server does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStorage, "download", fail)
        with pytest.raises(StorageError, match="the server does not answer"):
            RunWriter(other)
    RunWriter(other).close()
    assert (other.path / "results/a.json").read_text() == "1"


def test_an_outage_at_a_checkpoint_keeps_it_and_the_next_life_on_the_node_stores_it(
    make_copy: CopyMaker, make_view: ViewMaker, monkeypatch: pytest.MonkeyPatch
):
    copy = make_copy("a")
    writer = RunWriter(copy, timeout_s=60)
    save_checkpoint(copy, writer, 10, "10")

    def fail(*_: object) -> str:
        raise StorageError("the server does not answer")

    folder = copy.path / "checkpoints/step-000020"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStorage, "replace_if", fail)
        write(copy, "checkpoints/step-000020/dense/model.bin", "20")
        write(copy, "checkpoints/step-000020/manifest.json", "manifest of 20")
        writer.commit_or_wait()
        assert (
            "nothing could be stored for 0 s, and is tried again: the server does not"
            in writer.describe_outage()
        )
        writer.close(commit=False)  # the process is killed
    make_room(copy.path.parent / "another", root=copy.path.parents[1], limit=0)
    again = RunWriter(make_copy("a"))
    assert (folder / "dense/model.bin").read_text() == "20"
    again.close()
    view = make_view("b")
    view.fetch(view.path / "checkpoints")
    assert (view.path / "checkpoints/step-000020/dense/model.bin").read_text() == "20"


def test_what_a_killed_process_left_is_not_stored_after_another_node_went_on(
    make_copy: CopyMaker, make_view: ViewMaker
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/a.json", "1")
    writer.commit()
    write(copy, "results/a.json", "never stored")
    write(copy, "results/b.json", "never stored")
    writer.close(commit=False)
    other = make_copy("b")
    there = RunWriter(other)
    write(other, "results/a.json", "2")
    there.close()
    again = RunWriter(make_copy("a"))
    again.close()
    view = make_view("c")
    assert (view.path / "results/a.json").read_text() == "2"
    assert not (view.path / "results/b.json").exists()


def test_an_outage_ends_the_run_in_order_only_after_its_deadline(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch
):
    copy = make_copy("a")
    writer = RunWriter(copy, timeout_s=0.0)
    writer.commit()

    def fail(*_: object) -> str:
        raise StorageError("the server does not answer")

    monkeypatch.setattr(MemoryStorage, "put", fail)
    write(copy, "results/a.json", "1")
    assert writer.commit_in_background()
    time.sleep(0.001)
    with pytest.raises(StorageError, match=r"nothing could be stored for 0 s: .* raise deadlines\.storage"):
        writer.commit_or_wait()


def test_a_start_that_failed_deletes_its_run_and_nothing_of_a_run_that_works(
    make_copy: CopyMaker, make_view: ViewMaker, memory: MemoryStorage
):
    first, second = make_copy("a"), make_copy("b")
    started = RunWriter(first)
    write(first, "scenario.yaml", "name: x")
    started.close()
    assert started.discard()
    assert set(memory.objects) == {"head.json"}
    working = RunWriter(first)
    assert working.epoch == 2
    save_checkpoint(first, working, 10, "weights")
    again = RunWriter(second)
    write(second, "scenario.yaml", "name: y")
    again.close()
    assert not again.discard()
    view = make_view("c")
    view.fetch(view.path / "checkpoints")
    assert (view.path / "checkpoints/step-000010/dense/model.bin").read_text() == "weights"


def test_a_discarded_start_whose_run_another_process_has_opened_stays(
    make_copy: CopyMaker, memory: MemoryStorage
):
    first, second = make_copy("a"), make_copy("b")
    started = RunWriter(first)
    write(first, "scenario.yaml", "name: x")
    started.close()
    newer = RunWriter(second)
    assert not started.discard()
    newer.commit()
    assert set(newer._copy.read_tree().files) == {"scenario.yaml"}


class _KilledError(BaseException):
    """Stands for the end of a process."""


@pytest.mark.parametrize("requests", range(20))
def test_a_writer_that_is_killed_at_any_request_leaves_the_newest_complete_checkpoint(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch, requests: int
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "journal.jsonl", "1\n")
    remaining = requests
    committed = 0

    def count_request(method: str):
        real = getattr(copy.storage, method)

        def run(*args: object):
            nonlocal remaining
            if remaining == 0:
                raise _KilledError
            remaining -= 1
            return real(*args)

        return run

    def save_checkpoints() -> None:
        nonlocal committed
        for step in range(10, 100, 10):
            save_checkpoint(copy, writer, step, f"weights {step}" * 100)
            committed = step
            if step > 10:
                remove(writer, copy.path / f"checkpoints/step-{step - 10:06d}")

    with monkeypatch.context() as patch:
        for method in ("put", "replace_if", "delete", "get"):
            patch.setattr(copy.storage, method, count_request(method))
        with pytest.raises(_KilledError):
            save_checkpoints()
    reader = make_copy("b")
    opened = RunWriter(reader, garbage_grace_s=0)
    steps = sorted(int(folder.name[5:]) for folder in reader.path.glob("checkpoints/step-*"))
    # The swap of the head may have been the last request that succeeded.
    assert not steps or steps[-1] in (committed, committed + 10)
    assert steps or committed == 0
    if steps:
        folder = reader.path / f"checkpoints/step-{steps[-1]:06d}"
        reader.fetch(folder)
        assert (folder / "dense/model.bin").read_text() == f"weights {steps[-1]}" * 100
        assert (folder / "manifest.json").read_text() == f"manifest of {steps[-1]}"
    opened.close()
    assert list_objects(reader) == reader.read_tree().list_keys()
