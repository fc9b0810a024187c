"""Views of a stored run: each has one state, and changes nothing of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nonet.errors import StorageError
from nonet.storage import RunCopy, RunWriter
from nonet.storage.local_folders import read_folder_state
from nonet.storage.node_cache import make_room
from tests.storage.memory_storage import MemoryStorage
from tests.storage.run_steps import CopyMaker, ViewMaker, list_objects, save_checkpoint, write


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


def test_what_one_process_of_a_node_downloaded_another_one_does_not_until_it_made_room(
    make_copy: CopyMaker,
    make_view: ViewMaker,
    memory: MemoryStorage,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    copy = make_copy("a")
    writer = RunWriter(copy)
    for number, name in enumerate(("results/old.json", "results/new.json")):
        write(copy, name, f"{number}" * 1000)
    writer.close()
    first = make_view("b", "p1")

    def fail(*_: object) -> None:
        raise StorageError("it is downloaded again")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStorage, "download", fail)
        make_view("b", "p2")
    cache = tmp_path / "b/objects"
    old, new = (
        next(file for file in cache.glob("*/*") if file.read_text() == f"{number}" * 1000)
        for number in range(2)
    )
    os.utime(old, (1, 1))
    monkeypatch.setenv("NONET_CACHE_BYTES", "1500B")
    make_room(root=tmp_path / "b")
    assert (old.exists(), new.exists()) == (False, True)
    assert (first.path / "results/old.json").read_text() == "0" * 1000, "a view keeps what it has"
    assert (make_view("b", "p3").path / "results/old.json").read_text() == "0" * 1000


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
