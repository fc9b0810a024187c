"""A stored run: what commits keep, who may write, and what a killed writer leaves."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nonet.errors import ConfigError, StorageConflict, StorageError
from nonet.storage import ObjectStorage, RunCopy, RunWriter
from nonet.storage.run_tree import RunTree

CopyMaker = Callable[[str], RunCopy]


def write(copy: RunCopy, name: str, content: str) -> Path:
    file = copy.path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


def save_checkpoint(copy: RunCopy, writer: RunWriter, step: int, content: str) -> Path:
    """Write a checkpoint as ranks and controller do."""
    draft = copy.path / f"checkpoints/tmp-{step}-abcd"
    (draft / "dense").mkdir(parents=True)
    (draft / "dense/model.bin").write_text(content)
    written = {"dense/model.bin": (hashlib.sha256(content.encode()).hexdigest(), len(content))}
    copy.upload_written(draft, written)
    folder = copy.path / f"checkpoints/step-{step:06d}"
    with writer.hold():
        writer.add_written(draft, folder, written)
        draft.rename(folder)
        (folder / "manifest.json").write_text(f"manifest of {step}")
    writer.commit()
    return folder


def list_objects(copy: RunCopy) -> set[str]:
    return set(copy.storage.list_keys("objects"))


def test_another_node_has_the_small_files_at_once_and_a_checkpoint_when_it_is_needed(make_copy: CopyMaker):
    copy, other = make_copy("a"), make_copy("b")
    writer = RunWriter(copy)
    write(copy, "results/wall.json", "{}")
    save_checkpoint(copy, writer, 10, "weights")
    writer.close()
    other.fetch_small_files()
    folder = other.path / "checkpoints/step-000010"
    assert (other.path / "results/wall.json").read_text() == "{}"
    assert (folder / "manifest.json").exists()
    assert not (folder / "dense").exists()
    other.fetch(folder)
    assert (folder / "dense/model.bin").read_text() == "weights"


def test_a_changed_file_replaces_and_a_deleted_file_leaves_nothing_in_the_storage(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    file = write(copy, "results/wall.json", "1")
    write(copy, "results/old.npz", "x")
    writer.commit()
    file.write_text("22")
    (copy.path / "results/old.npz").unlink()
    writer.close()
    tree = make_copy("b").read_tree()
    assert set(tree.files) == {"results/wall.json"}
    assert list_objects(copy) == tree.list_keys()
    assert len(list(copy.storage.list_keys("trees"))) == 1


def test_a_commit_without_changes_writes_nothing(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "scenario.yaml", "name: x")
    writer.commit()
    before = copy.storage.get("head.json")
    writer.commit()
    assert copy.storage.get("head.json") == before
    writer.close()


def test_a_growing_file_is_uploaded_in_few_parts_and_read_whole(make_copy: CopyMaker):
    copy, other = make_copy("a"), make_copy("b")
    writer = RunWriter(copy)
    with (copy.path / "journal.jsonl").open("w") as journal:
        for number in range(100):
            journal.write(f"line {number}\n")
            journal.flush()
            writer.commit()
        journal.write("half a li")
        journal.flush()
        writer.commit()
    entry = copy.get_tree().files["journal.jsonl"]
    assert 1 < len(entry.parts) < 12
    other.fetch_small_files()
    assert (other.path / "journal.jsonl").read_text() == "".join(f"line {n}\n" for n in range(100))
    writer.close()


def test_an_empty_file_is_stored_as_one(make_copy: CopyMaker):
    copy, other = make_copy("a"), make_copy("b")
    writer = RunWriter(copy)
    write(copy, "metrics.jsonl", "")
    write(copy, "results/empty.json", "")
    writer.close()
    other.fetch_small_files()
    assert (
        (other.path / "metrics.jsonl").read_bytes() == (other.path / "results/empty.json").read_bytes() == b""
    )


def test_a_truncated_journal_replaces_the_longer_one_also_after_it_has_grown_again(make_copy: CopyMaker):
    copy, other = make_copy("a"), make_copy("b")
    writer = RunWriter(copy)
    journal = write(copy, "journal.jsonl", "1\n2\n3\n")
    writer.commit()
    journal.unlink()  # the next file may have the same inode
    write(copy, "journal.jsonl", "1\n4\n5\n6\n")
    writer.close()
    other.fetch_small_files()
    assert (other.path / "journal.jsonl").read_text() == "1\n4\n5\n6\n"


def test_a_pruned_checkpoint_and_its_objects_are_deleted_on_every_node(make_copy: CopyMaker):
    copy, other = make_copy("a"), make_copy("b")
    writer = RunWriter(copy)
    first = save_checkpoint(copy, writer, 10, "old")
    other.fetch(other.path / "checkpoints/step-000010")
    save_checkpoint(copy, writer, 20, "new")
    shutil.rmtree(first)
    writer.commit()
    other.fetch(other.path / "checkpoints/step-000020")
    assert [folder.name for folder in (other.path / "checkpoints").iterdir()] == ["step-000020"]
    assert not any("tmp-10" in key for key in list_objects(copy))
    writer.close()


def test_results_of_another_node_are_collected_once(make_copy: CopyMaker):
    copy, other = make_copy("a"), make_copy("b")
    writer = RunWriter(copy)
    writer.commit()
    other.epoch = writer.epoch
    write(other, "results/pretrain.npz", "ranks")
    write(other, "artifacts/sids/sids.parquet", "ids")
    writer.collect = lambda: other.upload_changed(writer.list_digests())
    writer.commit()
    assert (copy.path / "results/pretrain.npz").read_text() == "ranks"
    assert not (copy.path / "artifacts").exists()
    assert other.upload_changed(writer.list_digests()) == {}
    assert make_copy("b").upload_changed(writer.list_digests()) == {}
    writer.close()
    assert set(make_copy("c").read_tree().files) == {"results/pretrain.npz", "artifacts/sids/sids.parquet"}


def test_a_second_writer_fences_the_first_whose_late_writes_count_for_nothing(make_copy: CopyMaker):
    copy, other = make_copy("a"), make_copy("b")
    older = RunWriter(copy)
    write(copy, "results/a.json", "older")
    older.commit()
    newer = RunWriter(other)
    assert newer.epoch == older.epoch + 1
    write(copy, "results/a.json", "late")
    with pytest.raises(StorageConflict, match=r"opened it \(epoch 2\) after this process had \(epoch 1\)"):
        older.commit()
    with pytest.raises(StorageConflict):
        older.check()
    write(other, "results/b.json", "newer")
    newer.close()
    reader = make_copy("c")
    reader.fetch_small_files()
    assert (reader.path / "results/a.json").read_text() == "older"
    assert (reader.path / "results/b.json").read_text() == "newer"


def test_what_an_older_writer_left_is_deleted_when_the_run_is_opened_again(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/a.json", "1")
    writer.commit()
    draft = copy.path / "checkpoints/tmp-10-abcd"
    draft.mkdir(parents=True)
    (draft / "x").write_text("never added")
    copy.upload_written(draft, {"x": ("", 13)})
    writer.close(commit=False)
    RunWriter(make_copy("b")).close()
    assert list_objects(copy) == make_copy("c").read_tree().list_keys()


def test_commits_in_the_background_go_on_after_a_failure_and_report_it_once(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("nonet.storage.run_writer.COMMIT_S", 0.01)
    copy, failed = make_copy("a"), threading.Event()
    writer = RunWriter(copy)
    real_put = ObjectStorage.put

    def fail_once(storage: ObjectStorage, key: str, content: bytes) -> None:
        if not failed.is_set():
            failed.set()
            raise StorageError("s3://feed-runs: the server does not answer")
        real_put(storage, key, content)

    monkeypatch.setattr(ObjectStorage, "put", fail_once)
    write(copy, "results/a.json", "1")
    writer.start_commits()
    assert failed.wait(60)
    while not make_copy("b").read_tree().files:
        time.sleep(0.01)
    assert (
        "1 commits failed, and are tried again: s3://feed-runs: the server does not" in writer.pop_warning()
    )
    assert writer.pop_warning() == ""
    writer.close()


def test_a_run_of_a_single_writer_needs_no_conditions_also_when_it_is_opened_again(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> str:
        raise StorageError("501 Not Implemented")

    for method in ("put_if_absent", "replace_if"):
        monkeypatch.setattr(ObjectStorage, method, refuse)
    with pytest.raises(StorageError, match="501"):
        RunWriter(make_copy("a"))
    writer = RunWriter(make_copy("a"), single_writer=True)
    writer.commit()
    writer.close()
    again = RunWriter(make_copy("b"))
    assert again.epoch == 2
    write(make_copy("b"), "results/a.json", "1")
    again.close()
    assert set(make_copy("c").read_tree().files) == {"results/a.json"}


def test_a_writer_whose_storage_fails_while_it_opens_leaves_the_copy_unlocked(
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
        patch.setattr(ObjectStorage, "download", fail)
        with pytest.raises(StorageError, match="the server does not answer"):
            RunWriter(other)
    assert not other.has_open_writer()
    RunWriter(other).close()


def test_unused_objects_that_cannot_be_deleted_are_reported(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    file = write(copy, "results/a.json", "1")
    writer.commit()

    def refuse(*_: object) -> None:
        raise StorageError("access is denied")

    monkeypatch.setattr(ObjectStorage, "delete", refuse)
    file.write_text("22")
    writer.commit()
    assert "2 unused objects could not be deleted" in writer.pop_warning()
    assert writer.pop_warning() == ""
    monkeypatch.undo()
    writer.close()


def test_two_processes_of_a_node_cannot_write_one_run(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    with pytest.raises(ConfigError, match="is being run by another process of"):
        RunWriter(copy)
    writer.close()
    RunWriter(copy).close()


def test_a_reader_beside_an_open_writer_changes_none_of_its_files(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    file = write(copy, "results/a.json", "1")
    writer.commit()
    file.write_text("2")
    new_file = write(copy, "results/b.json", "not committed")
    make_copy("a").fetch_small_files()
    assert file.read_text() == "2"
    assert new_file.exists()
    writer.close()


def test_a_reader_replaces_and_deletes_what_differs_from_the_stored_run(make_copy: CopyMaker):
    copy, other = make_copy("a"), make_copy("b")
    writer = RunWriter(copy)
    write(copy, "results/a.json", "1")
    writer.close()
    file, stale = write(other, "results/a.json", "9"), write(other, "results/stale.npz", "x")
    other.fetch_small_files(replaces=False)
    assert file.read_text() == "9"
    assert stale.exists()
    other.fetch_small_files()
    assert file.read_text() == "1"
    assert not stale.exists()


def test_a_reader_goes_on_with_the_next_tree_where_a_writer_has_deleted_what_it_reads(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch
):
    copy, other = make_copy("a"), make_copy("b")
    writer = RunWriter(copy)
    write(copy, "status.json", "1")
    writer.commit()
    real_download = ObjectStorage.download

    def commit_first(storage: ObjectStorage, key: str, path: Path) -> None:
        monkeypatch.undo()
        write(copy, "status.json", "22")
        writer.commit()
        real_download(storage, key, path)

    monkeypatch.setattr(ObjectStorage, "download", commit_first)
    other.fetch_small_files()
    assert (other.path / "status.json").read_text() == "22"
    writer.close()


def test_a_damaged_object_is_an_error_and_leaves_no_file(make_copy: CopyMaker):
    copy, other = make_copy("a"), make_copy("b")
    writer = RunWriter(copy)
    write(copy, "results/a.json", "good")
    writer.close()
    (key,) = list_objects(copy)
    copy.storage.put(key, b"evil")
    with pytest.raises(StorageError, match=r"stored content of results/a\.json is damaged"):
        other.fetch_small_files()
    assert not (other.path / "results/a.json").exists()


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
        real = getattr(ObjectStorage, method)

        def run(self: ObjectStorage, *args: object):
            nonlocal remaining
            if remaining == 0 and self is copy.storage:
                raise _KilledError
            remaining -= 1
            return real(self, *args)

        return run

    def save_checkpoints() -> None:
        nonlocal committed
        for step in range(10, 100, 10):
            save_checkpoint(copy, writer, step, f"weights {step}" * 100)
            committed = step
            if step > 10:
                shutil.rmtree(copy.path / f"checkpoints/step-{step - 10:06d}")

    with monkeypatch.context() as patch:
        for method in ("put", "upload", "replace_if", "delete", "get"):
            patch.setattr(ObjectStorage, method, count_request(method))
        with pytest.raises(_KilledError):
            save_checkpoints()
    reader = make_copy("b")
    opened = RunWriter(reader)
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


def test_a_tree_is_the_same_after_it_was_stored(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/a.json", "1")
    writer.close()
    tree = copy.read_tree()
    assert RunTree.decode(tree.encode()) == tree
    assert set(tree.select("results")) == {"results/a.json"}
    assert not tree.select("res")
