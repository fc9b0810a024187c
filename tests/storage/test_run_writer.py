"""A stored run: what commits keep, who may write, and what a killed writer leaves."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nonet.errors import CheckpointError, ConfigError, StorageConflict, StorageError
from nonet.storage import RunCopy, RunView, RunWriter
from nonet.storage.local_folders import make_room, read_folder_state
from nonet.storage.run_tree import PART_BYTES, RunHead, RunTree
from tests.storage.memory_storage import MemoryStorage

CopyMaker = Callable[..., RunCopy]
ViewMaker = Callable[..., RunView]


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


def remove(writer: RunWriter, path: Path) -> None:
    """Delete a file or folder of the run, as `storage.remove` does."""
    with writer.hold():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        writer.add_deleted(path, "of no use")


def list_objects(copy: RunCopy) -> set[str]:
    return set(copy.storage.list_objects("objects"))


def test_another_node_has_the_small_files_at_once_and_a_checkpoint_when_it_is_needed(
    make_copy: CopyMaker, make_view: ViewMaker
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/wall.json", "{}")
    save_checkpoint(copy, writer, 10, "weights")
    writer.close()
    view = make_view("b")
    folder = view.path / "checkpoints/step-000010"
    assert (view.path / "results/wall.json").read_text() == "{}"
    assert (folder / "manifest.json").exists()
    assert not (folder / "dense/model.bin").exists()
    view.fetch(folder)
    assert (folder / "dense/model.bin").read_text() == "weights"


def test_a_changed_file_replaces_and_a_deleted_file_leaves_nothing_in_the_storage(
    make_copy: CopyMaker, make_view: ViewMaker
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    file = write(copy, "results/wall.json", "1")
    old = write(copy, "results/old.npz", "x")
    writer.commit()
    file.write_text("22")
    remove(writer, old)
    writer.close()
    tree = make_view("b").get_tree()
    assert set(tree.files) == {"results/wall.json"}
    assert tree.deleted == {"results/old.npz": "of no use"}
    assert list_objects(copy) == tree.list_keys()
    assert len(copy.storage.list_objects("trees")) == 1


def test_a_file_that_is_only_missing_stays_in_the_run(make_copy: CopyMaker, make_view: ViewMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/kept.json", "1").unlink()
    lost = write(copy, "results/a.json", "1")
    folder = save_checkpoint(copy, writer, 10, "weights")
    lost.unlink()
    shutil.rmtree(folder)
    write(copy, "results/b.json", "2")
    writer.close()
    view = make_view("b")
    view.fetch(view.path / "checkpoints/step-000010")
    assert (view.path / "results/a.json").read_text() == "1"
    assert (view.path / "results/b.json").read_text() == "2"
    assert (view.path / "checkpoints/step-000010/dense/model.bin").read_text() == "weights"


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


def test_a_commit_without_changes_writes_nothing(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "scenario.yaml", "name: x")
    writer.commit()
    before = copy.storage.get("head.json")
    writer.commit()
    assert copy.storage.get("head.json") == before
    writer.close()


def test_a_growing_file_is_uploaded_in_few_parts_and_read_whole(make_copy: CopyMaker, make_view: ViewMaker):
    copy = make_copy("a")
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
    view = make_view("b")
    assert (view.path / "journal.jsonl").read_text() == "".join(f"line {n}\n" for n in range(100))
    writer.close()


def test_an_empty_file_is_stored_as_one(make_copy: CopyMaker, make_view: ViewMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "metrics.jsonl", "")
    write(copy, "results/empty.json", "")
    writer.close()
    view = make_view("b")
    assert (view.path / "metrics.jsonl").read_bytes() == b""
    assert (view.path / "results/empty.json").read_bytes() == b""


def test_a_truncated_journal_replaces_the_longer_one_also_after_it_has_grown_again(
    make_copy: CopyMaker, make_view: ViewMaker
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    journal = write(copy, "journal.jsonl", "1\n2\n3\n")
    writer.commit()
    journal.unlink()  # the next file may have the same inode
    write(copy, "journal.jsonl", "1\n4\n5\n6\n")
    writer.close()
    assert (make_view("b").path / "journal.jsonl").read_text() == "1\n4\n5\n6\n"


def test_a_pruned_checkpoint_and_its_objects_are_deleted_on_every_node(
    make_copy: CopyMaker, make_view: ViewMaker
):
    copy = make_copy("a")
    writer = RunWriter(copy, read_grace_s=0)
    first = save_checkpoint(copy, writer, 10, "old")
    worker, view = make_copy("b", epoch=1), make_view("c")
    for run in (worker, view):
        run.fetch(run.path / "checkpoints/step-000010")
    save_checkpoint(copy, writer, 20, "new")
    remove(writer, first)
    writer.commit()
    for run in (worker, view):
        run.fetch(run.path / "checkpoints/step-000020")
        left = [
            folder.name for folder in (run.path / "checkpoints").glob("step-*") if list(folder.rglob("*.bin"))
        ]
        assert left == ["step-000020"]
    assert not any("tmp-10" in key for key in list_objects(copy))
    writer.close()


def test_what_a_commit_replaced_stays_for_readers_until_the_writer_is_closed(
    make_copy: CopyMaker, make_view: ViewMaker
):
    copy, view = make_copy("a"), make_view("b", fetches=False)
    writer = RunWriter(copy)
    folder = save_checkpoint(copy, writer, 10, "weights")
    view.fetch(view.path)
    remove(writer, folder)
    writer.commit()
    assert any("tmp-10" in key for key in list_objects(copy))
    writer.close()
    assert not any("tmp-10" in key for key in list_objects(copy))


def test_a_large_file_has_several_objects(
    make_copy: CopyMaker, make_view: ViewMaker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("nonet.storage.run_tree.PART_BYTES", 1000)
    copy = make_copy("a")
    writer = RunWriter(copy)
    folder = save_checkpoint(copy, writer, 10, "0123456789" * 250)
    write(copy, "results/ranks.npz", "0123456789" * 101)
    writer.close()
    files = copy.get_tree().files
    sizes = [part.size for part in files["checkpoints/step-000010/dense/model.bin"].parts]
    assert sizes == [1000, 1000, 500]
    view, worker = make_view("b"), make_copy("c", epoch=1)
    for run in (view, worker):
        run.fetch(run.path / "checkpoints")
        content = (run.path / "checkpoints/step-000010/dense/model.bin").read_text()
        assert content == (folder / "dense/model.bin").read_text()
    assert (view.path / "results/ranks.npz").read_text() == "0123456789" * 101
    assert PART_BYTES > 1000


def test_results_of_another_node_are_collected_once(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    writer.commit()
    worker = make_copy("b", epoch=1, generation=copy.describe_for_new_process().generation)
    worker.put(write(worker, "results/pretrain.npz", "ranks"))
    write(worker, "artifacts/sids/sids.parquet", "ids")
    write(worker, "artifacts/tmp-sids-1/sids.parquet", "half")
    worker.put(worker.path / "artifacts")
    write(worker, "results/of-a-users-code.npz", "x")
    writer.collect = lambda: worker.list_put(0)
    writer.commit()
    assert (copy.path / "results/pretrain.npz").read_text() == "ranks"
    assert not (copy.path / "artifacts/sids/sids.parquet").exists()
    assert worker.list_put(2) == []
    writer.close()
    assert set(copy.get_tree().files) == {"results/pretrain.npz", "artifacts/sids/sids.parquet"}


def test_what_a_node_fetched_or_an_earlier_process_made_replaces_no_newer_result(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/rl.json", "[10]")
    writer.commit()
    older = make_copy("b", epoch=1, generation=copy.describe_for_new_process().generation)
    newer = make_copy("c", epoch=1, generation=copy.describe_for_new_process().generation)
    older.fetch_small_files()
    write(copy, "results/rl.json", "[10,20]")
    writer.commit()
    older.put(write(older, "results/rl.npz", "of the older"))
    newer.put(write(newer, "results/rl.npz", "of the newer"))
    writer.collect = lambda: newer.list_put(0)
    writer.commit()
    writer.collect = lambda: older.list_put(0)
    writer.close()
    assert (copy.path / "results/rl.json").read_text() == "[10,20]"
    assert (copy.path / "results/rl.npz").read_text() == "of the newer"


def test_a_collected_file_that_cannot_be_fetched_is_added_by_the_next_commit(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    writer.commit()
    worker = make_copy("b", epoch=1)
    worker.put(write(worker, "results/pretrain.npz", "ranks"))

    def fail(*_: object) -> None:
        raise StorageError("the server does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStorage, "download", fail)
        writer.collect = lambda: worker.list_put(0)
        with pytest.raises(StorageError):
            writer.commit()
    writer.collect = tuple
    writer.close()
    assert (copy.path / "results/pretrain.npz").read_text() == "ranks"


def test_a_result_that_was_deleted_does_not_come_back_from_an_older_process(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    writer.commit()
    older = make_copy("b", epoch=1, generation=copy.describe_for_new_process().generation)
    older.put(write(older, "results/rl.npz", "before the cut"))
    older.put(write(older, "results/pretrain.npz", "kept"))
    with writer.hold():
        writer.add_deleted(copy.path / "results/rl.npz", "the run was cut")
    writer.collect = lambda: older.list_put(0)
    writer.commit()
    assert set(copy.get_tree().files) == {"results/pretrain.npz"}
    newer = make_copy("c", epoch=1, generation=copy.describe_for_new_process().generation)
    newer.put(write(newer, "results/rl.npz", "made again"))
    writer.collect = lambda: newer.list_put(0)
    writer.close()
    assert (copy.path / "results/rl.npz").read_text() == "made again"
    assert set(copy.get_tree().files) == {"results/pretrain.npz", "results/rl.npz"}


def test_parts_of_a_growing_file_are_no_larger_than_an_object(
    make_copy: CopyMaker, make_view: ViewMaker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("nonet.storage.run_tree.PART_BYTES", 1000)
    copy = make_copy("a")
    writer = RunWriter(copy)
    lines = [f"{number:098}\n" for number in range(120)]
    sizes: list[list[int]] = []
    for begin in range(0, 120, 30):
        with (copy.path / "metrics.jsonl").open("a") as file:
            file.writelines(lines[begin : begin + 30])
        writer.commit()
        sizes.append([part.size for part in copy.get_tree().files["metrics.jsonl"].parts])
    writer.close()
    assert all(size <= 1000 for row in sizes for size in row)
    assert sum(sizes[-1]) == 120 * 99
    assert len(sizes[-1]) < 24
    assert (make_view("b").path / "metrics.jsonl").read_text() == "".join(lines)


def test_a_second_writer_fences_the_first_whose_late_writes_count_for_nothing(
    make_copy: CopyMaker, make_view: ViewMaker
):
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
    reader = make_view("c")
    assert (reader.path / "results/a.json").read_text() == "older"
    assert (reader.path / "results/b.json").read_text() == "newer"


def test_an_older_writer_without_changes_learns_that_it_is_fenced(make_copy: CopyMaker):
    older = RunWriter(make_copy("a"))
    older.commit()
    RunWriter(make_copy("b"))
    with pytest.raises(StorageConflict):
        older.commit()


@pytest.mark.parametrize("times", [1, 3])
def test_a_swap_whose_answer_was_lost_is_no_conflict_with_oneself(
    make_copy: CopyMaker, make_view: ViewMaker, monkeypatch: pytest.MonkeyPatch, times: int
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    writer.commit()
    real_replace = MemoryStorage.replace_if
    lost = times

    def lose_answers(self: MemoryStorage, key: str, content: bytes, etag: str) -> str:
        nonlocal lost
        written = real_replace(self, key, content, etag)
        if lost:
            lost -= 1
            raise StorageError("the server does not answer")
        return written

    monkeypatch.setattr(MemoryStorage, "replace_if", lose_answers)
    for number in range(times):
        write(copy, f"results/{number}.json", "1")
        assert writer.commit_in_background()
    write(copy, "results/last.json", "1")
    writer.close()
    assert len(make_view("b").get_tree().files) == times + 1
    assert list_objects(copy) == copy.get_tree().list_keys()
    assert len(copy.storage.list_objects("trees")) == 1


def test_what_an_older_writer_left_is_deleted_once_no_reader_can_need_it(
    make_copy: CopyMaker, memory: MemoryStorage
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/a.json", "1")
    writer.commit()
    draft = copy.path / "checkpoints/tmp-10-abcd"
    draft.mkdir(parents=True)
    (draft / "x").write_text("never added")
    copy.upload_written(draft, {"x": ("", 11)})
    writer.close(commit=False)
    young = RunWriter(make_copy("b"))
    assert len(list_objects(copy)) == 2
    memory.now += 901
    young.commit()
    write(make_copy("b"), "results/b.json", "1")
    young.commit()
    young.delete_garbage()
    assert list_objects(copy) == copy.read_tree().list_keys()
    young.close()


def test_a_writer_that_was_suspended_while_it_opened_deletes_nothing_of_a_newer_one(
    make_copy: CopyMaker, make_view: ViewMaker, memory: MemoryStorage, monkeypatch: pytest.MonkeyPatch
):
    first = RunWriter(make_copy("a"))
    first.commit()
    first.close()
    real_delete_garbage = RunWriter.delete_garbage

    def be_suspended(writer: RunWriter) -> None:
        monkeypatch.undo()
        there = make_copy("c")
        newer = RunWriter(there)
        save_checkpoint(there, newer, 20, "of the newer")
        memory.now += 10_000
        write(there, "results/a.json", "1")
        newer.commit()
        real_delete_garbage(writer)

    monkeypatch.setattr(RunWriter, "delete_garbage", be_suspended)
    older = RunWriter(make_copy("b"))
    with pytest.raises(StorageConflict):
        older.commit()
    view = make_view("d")
    view.fetch(view.path / "checkpoints/step-000020")
    assert (view.path / "checkpoints/step-000020/dense/model.bin").read_text() == "of the newer"


@pytest.mark.parametrize(
    "error",
    [StorageError("s3://feed-runs: the server does not answer"), OSError(28, "No space left on device")],
)
def test_commits_in_the_background_go_on_after_any_failure_and_report_it_once(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    monkeypatch.setattr("nonet.storage.run_writer.COMMIT_S", 0.01)
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


def test_a_run_of_a_single_writer_needs_no_conditions_also_when_it_is_opened_again(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> str:
        raise StorageError("501 Not Implemented")

    for method in ("put_if_absent", "replace_if"):
        monkeypatch.setattr(MemoryStorage, method, refuse)
    with pytest.raises(StorageError, match="501"):
        RunWriter(make_copy("a"))
    writer = RunWriter(make_copy("a"), single_writer=True)
    writer.commit()
    writer.close()
    other = make_copy("b")
    again = RunWriter(other)
    assert again.epoch == 2
    write(other, "results/a.json", "1")
    again.close()
    assert set(make_copy("c").read_tree().files) == {"results/a.json"}


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


def test_unused_objects_that_cannot_be_deleted_are_reported(
    make_copy: CopyMaker, monkeypatch: pytest.MonkeyPatch
):
    copy = make_copy("a")
    writer = RunWriter(copy, read_grace_s=0)
    file = write(copy, "results/a.json", "1")
    writer.commit()

    def refuse(*_: object) -> None:
        raise StorageError("access is denied")

    monkeypatch.setattr(MemoryStorage, "delete", refuse)
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


def test_a_reader_on_the_node_of_a_writer_or_worker_changes_none_of_its_files(
    make_copy: CopyMaker, make_view: ViewMaker
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    file = write(copy, "results/a.json", "1")
    writer.commit()
    worker = make_copy("b", epoch=1)
    made = [
        write(run, name, "not stored")
        for run in (copy, worker)
        for name in ("results/b.json", "artifacts/x/y")
    ]
    made += [
        write(worker, "checkpoints/tmp-10-abcd/model.bin", "half"),
        write(worker, "results/rl.npz", "ranks"),
    ]
    file.write_text("2")
    for node in ("a", "b"):
        view = make_view(node)
        view.fetch(view.path)
        assert (view.path / "results/a.json").read_text() == "1"
        assert not (view.path / "results/b.json").exists()
    assert file.read_text() == "2"
    assert all(path.exists() for path in made)
    writer.close()


def test_a_view_keeps_the_checkpoint_that_was_fetched_when_it_is_brought_to_a_newer_state(
    make_copy: CopyMaker, make_view: ViewMaker
):
    copy, view = make_copy("a"), make_view("b", fetches=False)
    writer = RunWriter(copy)
    save_checkpoint(copy, writer, 10, "weights")
    view.fetch(view.path / "checkpoints/step-000010")
    write(copy, "results/a.json", "1")
    writer.close()
    view.fetch(view.path)
    assert (view.path / "checkpoints/step-000010/dense/model.bin").read_text() == "weights"
    assert (view.path / "results/a.json").read_text() == "1"


def test_two_readers_of_a_node_each_have_one_state(make_copy: CopyMaker, make_view: ViewMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    for text in ("1", "2"):
        for name in ("results/a.json", "results/b.json"):
            write(copy, name, text)
        writer.commit()
        make_view("b", f"p{text}")
    writer.close()
    views = [make_view("b", process, fetches=False) for process in ("p1", "p2")]
    for view, text in zip(views, "12", strict=True):
        assert {(view.path / name).read_text() for name in ("results/a.json", "results/b.json")} == {text}
    assert not any(view.is_owner for view in views)
    views[0].fetch(views[0].path)  # a process that its owner has started stays with the state of the view
    assert (views[0].path / "results/a.json").read_text() == "1"


def test_a_view_that_cannot_be_brought_to_the_next_state_keeps_its_own(
    make_copy: CopyMaker, make_view: ViewMaker, monkeypatch: pytest.MonkeyPatch
):
    copy, view = make_copy("a"), make_view("b", fetches=False)
    writer = RunWriter(copy)
    names = [f"results/{number}.json" for number in range(4)]
    for name in names:
        write(copy, name, f"1 {name}")
    writer.commit()
    view.fetch(view.path)
    for name in names:
        write(copy, name, f"2 {name}")
    writer.commit()
    real_download, downloads = MemoryStorage.download, 0

    def fail_at_the_third(storage: MemoryStorage, key: str, path: Path, size: int) -> None:
        nonlocal downloads
        downloads += 1
        if downloads > 2:
            raise StorageError("the server does not answer")
        real_download(storage, key, path, size)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStorage, "download", fail_at_the_third)
        with pytest.raises(StorageError):
            view.fetch(view.path)
    assert {(view.path / name).read_text()[0] for name in names} == {"1"}
    view.fetch(view.path)
    assert {(view.path / name).read_text()[0] for name in names} == {"2"}
    writer.close()


def test_a_worker_replaces_and_deletes_what_it_fetched_and_nothing_that_was_made_there(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    fetched, dropped = write(copy, "results/a.json", "1"), write(copy, "results/b.json", "1")
    writer.commit()
    worker = make_copy("b", epoch=1)
    worker.fetch_small_files()
    made = write(worker, "results/made.npz", "here")
    fetched.write_text("22")
    write(copy, "results/made.npz", "of an older process")
    remove(writer, dropped)
    writer.commit()
    worker.fetch_small_files()
    assert (worker.path / "results/a.json").read_text() == "22"
    assert not (worker.path / "results/b.json").exists()
    assert made.read_text() == "here"
    writer.close()


def test_a_worker_of_the_next_life_of_a_run_begins_with_the_stored_state(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/a.json", "1")
    writer.commit()
    worker = make_copy("b", epoch=1)
    worker.fetch_small_files()
    write(worker, "results/never-collected.npz", "x")
    write(worker, "checkpoints/tmp-10-abcd/model.bin", "half")
    writer.close()
    RunWriter(make_copy("a"))
    later = make_copy("b", epoch=2)
    assert list(later.iterate_files()) == ["results/a.json"]
    assert not (later.path / "checkpoints/tmp-10-abcd").exists()
    with pytest.raises(StorageConflict, match=r"epoch 2 of .* uses .*, and this process belongs to epoch 1"):
        make_copy("b", epoch=1)


def test_a_worker_deletes_no_drafts_of_processes_that_were_started_after_it(make_copy: CopyMaker):
    writer = RunWriter(make_copy("a"))
    writer.commit()
    older, newer = (make_copy("b", epoch=1, generation=generation) for generation in (1, 2))
    drafts = {}
    for copy, step in ((newer, 20), (older, 10), (newer, 30)):
        drafts[step] = write(copy, f"checkpoints/tmp-{step}-abcd/model.bin", "x").parent
        copy.upload_written(drafts[step], {"model.bin": ("", 1)})
        assert drafts[step].exists()
        assert drafts[20].exists() or step == 30
    assert [draft.exists() for draft in drafts.values()] == [False, False, True]


def test_a_reader_goes_on_with_the_next_tree_where_a_writer_has_deleted_what_it_reads(
    make_copy: CopyMaker, make_view: ViewMaker, monkeypatch: pytest.MonkeyPatch
):
    copy, view = make_copy("a"), make_view("b", fetches=False)
    writer = RunWriter(copy, read_grace_s=0)
    write(copy, "status.json", "1")
    writer.commit()
    real_download = MemoryStorage.download

    def commit_first(storage: MemoryStorage, key: str, path: Path, size: int) -> None:
        monkeypatch.undo()
        write(copy, "status.json", "22")
        writer.commit()
        real_download(storage, key, path, size)

    monkeypatch.setattr(MemoryStorage, "download", commit_first)
    view.fetch(view.path)
    assert (view.path / "status.json").read_text() == "22"
    writer.close()


def test_a_damaged_object_is_an_error_and_leaves_no_file(make_copy: CopyMaker, make_view: ViewMaker):
    copy, view = make_copy("a"), make_view("b", fetches=False)
    writer = RunWriter(copy)
    write(copy, "results/a.json", "good")
    writer.close()
    (key,) = list_objects(copy)
    copy.storage.put(key, b"evil")
    with pytest.raises(StorageError, match=r"content of results/a\.json is damaged"):
        view.fetch(view.path)
    assert not (view.path / "results/a.json").exists()
    with pytest.raises(StorageError, match=r"content of results/a\.json is damaged"):
        make_copy("c", epoch=1).fetch_small_files()


@pytest.mark.parametrize(
    "name",
    ["../x", "/tmp/x", "a/../../x", "a//b", "./a", "", ".", "a/./b", "a/..", "x\0y", 7, "objects/../../y"],
)
def test_a_tree_that_names_a_file_outside_the_run_is_refused(name: object):
    entry = [0.0, [["objects/1/a", 1, "0" * 64]], "0" * 64, 0]
    tree = {"format": 2, "files": {name: entry} if isinstance(name, str) else {"a": entry}}
    if not isinstance(name, str):
        tree["files"] = {"a": [0.0, [[name, 1, "0" * 64]], "0" * 64, 0]}
    with pytest.raises(CheckpointError, match="the tree of a run in object storage is damaged"):
        RunTree.decode(json.dumps(tree).encode())
    if isinstance(name, str) and name:
        head = {"run": "x", "epoch": 1, "tree": name, "owner": "", "opened": 0.0, "commit": "", "format": 2}
        with pytest.raises(CheckpointError, match="the head of a run in object storage is damaged"):
            RunHead.decode(json.dumps(head).encode())


@pytest.mark.parametrize(
    "parts",
    [
        [["objects/1/a", -1, "0" * 64]],
        [["objects/1/a", 1.5, "0" * 64]],
        [["objects/1/a", 1, "short"]],
        [["objects/1/a", 1]],
        [["objects/1/a", 1, ""], ["objects/1/b", 1, ""]],
        "abc",
        None,
    ],
)
def test_a_tree_with_parts_that_cannot_be_is_refused(parts: object):
    tree = {"format": 2, "files": {"a": [0.0, parts, None, 0]}}
    with pytest.raises(CheckpointError, match="is damaged, or somebody else wrote it"):
        RunTree.decode(json.dumps(tree).encode())


def test_a_run_of_the_format_before_is_read_and_converted_by_the_first_write(
    make_copy: CopyMaker, make_view: ViewMaker, memory: MemoryStorage
):
    digest = hashlib.sha256(b"1\n").hexdigest()
    part = ["objects/1/journal.jsonl@0-2-x", 2, digest]
    result = ["objects/1/results/a.json@x", 2, digest]
    memory.put("objects/1/journal.jsonl@0-2-x", b"1\n")
    memory.put("objects/1/results/a.json@x", b"1\n")
    tree = {"format": 1, "files": {"journal.jsonl": [5.0, [part, part]], "results/a.json": [5.0, [result]]}}
    memory.put("trees/1-1.json", json.dumps(tree).encode())
    head = {"run": "run-1", "epoch": 1, "tree": "trees/1-1.json", "owner": "x", "opened": 1.0, "commit": "a"}
    memory.put("head.json", json.dumps({**head, "single_writer": False, "format": 1}).encode())
    view = make_view("b")
    assert (view.path / "journal.jsonl").read_text() == "1\n1\n"
    copy = make_copy("a")
    writer = RunWriter(copy)
    with (copy.path / "journal.jsonl").open("a") as journal:
        journal.write("2\n")
    writer.close()
    view.fetch(view.path)
    assert (view.path / "journal.jsonl").read_text() == "1\n1\n2\n"
    assert (view.path / "results/a.json").read_text() == "1\n"
    assert json.loads(memory.objects["head.json"].content)["format"] == 2


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


def test_posts_stay_when_work_folders_make_room(make_copy: CopyMaker, make_view: ViewMaker, tmp_path: Path):
    copy = make_copy("a")
    RunWriter(copy).close()
    view = make_view("a")
    (view.path / "serving/events.jsonl").write_text("an acknowledged post\n")
    served = next((tmp_path / "a").glob("*/run-1/serving")).parent
    assert read_folder_state(served) is not None
    write(RunCopy(copy.describe(), copy.storage), "results/a.json", "1")
    for folder in (served, copy.path):
        (folder / "large").write_text("x" * 1000)
    copy.release()
    make_room(tmp_path / "a/other/run", root=tmp_path / "a", limit=0)
    assert (view.path / "serving/events.jsonl").read_text() == "an acknowledged post\n"
    assert not (served / "large").exists()


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


def test_a_tree_is_the_same_after_it_was_stored(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "results/a.json", "1")
    writer.close()
    tree = copy.read_tree()
    assert RunTree.decode(tree.encode()) == tree
    assert set(tree.select("results")) == {"results/a.json"}
    assert not tree.select("res")


@pytest.mark.parametrize(
    "name",
    [".storage.json", "serving/withdrawn.json", "commands/1.json", "sources/__pycache__/x.pyc", "a/.b"],
)
def test_a_tree_that_names_what_no_writer_stores_is_refused(name: str):
    tree = {"format": 2, "files": {name: [0.0, [["objects/1/a", 1, "0" * 64]], "0" * 64, 0]}}
    with pytest.raises(CheckpointError, match="is damaged, or somebody else wrote it"):
        RunTree.decode(json.dumps(tree).encode())
