"""A stored run: what commits keep, and who may write."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest

from nonet.errors import ConfigError, StorageConflict, StorageError
from nonet.storage import RunWriter
from nonet.storage.run_tree import HEAD, PART_BYTES, RunHead, RunTree
from tests.storage.memory_storage import MemoryStorage
from tests.storage.run_steps import CopyMaker, ViewMaker, list_objects, remove, save_checkpoint, write


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


def test_a_commit_without_changes_writes_nothing(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    write(copy, "scenario.yaml", "name: x")
    writer.commit()
    before = copy.storage.get("head.json")
    writer.commit()
    assert copy.storage.get("head.json") == before
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


def test_a_pruned_checkpoint_leaves_the_run_although_its_files_are_on_another_node_only(
    make_copy: CopyMaker,
):
    first = make_copy("a")
    writer = RunWriter(first)
    save_checkpoint(first, writer, 10, "old")
    writer.close()
    copy = make_copy("b")
    writer = RunWriter(copy)
    folder = copy.path / "checkpoints/step-000010"
    assert not list(folder.rglob("*.bin"))  # large files are fetched only where they are read
    folder.mkdir(parents=True, exist_ok=True)
    remove(writer, folder)
    writer.commit()
    writer.close()
    head = RunHead.decode(copy.storage.get(HEAD).content)
    assert not RunTree.decode(copy.storage.get(head.tree).content).select("checkpoints/step-000010")


def test_files_of_a_user_with_names_like_those_of_drafts_are_stored(
    make_copy: CopyMaker, make_view: ViewMaker
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    names = {
        "sources/tmp-words.txt",
        "sources/reward.old-1.py",
        "sources/tmp-tables/a.csv",
        "results/tmp-a.json",
    }
    for name in names | {
        "artifacts/tmp-sids-1/sids.parquet",
        "checkpoints/step-000010.old-1/dense/model.bin",
    }:
        write(copy, name, "1")
    writer.close()
    assert set(copy.get_tree().files) == names
    assert (make_view("b").path / "sources/tmp-tables/a.csv").read_text() == "1"


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


def test_a_start_that_waited_leaves_the_run_to_a_start_of_the_same_name(make_copy: CopyMaker):
    prepared = RunWriter(make_copy("a"))
    write(prepared._copy, "scenario.yaml", "name: first")
    prepared.close()
    other = RunWriter(make_copy("b"))
    write(other._copy, "scenario.yaml", "name: second")
    other.close()
    waiting = make_copy("c")
    with pytest.raises(StorageConflict, match="while this start of it waited, and is left to that process"):
        RunWriter(waiting, after_epoch=prepared.epoch)
    assert waiting.read_tree() == other._copy.get_tree()
    RunWriter(waiting, after_epoch=other.epoch).close()


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
