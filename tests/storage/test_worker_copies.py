"""Work folders of workers on other nodes, and what they store."""

from __future__ import annotations

import threading
import time

import pytest

from nonet.errors import StorageConflict, StorageError
from nonet.storage import FileEntry, RunWriter
from tests.storage.memory_storage import MemoryStorage
from tests.storage.run_steps import CopyMaker, remove, write


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
    writer.collect_from(lambda: worker.list_put(0))
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
    writer.collect_from(lambda: newer.list_put(0))
    writer.commit()
    writer.collect_from(lambda: older.list_put(0))
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
        writer.collect_from(lambda: worker.list_put(0))
        with pytest.raises(StorageError):
            writer.commit()
    writer.collect_from(tuple)
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
    writer.collect_from(lambda: older.list_put(0))
    writer.commit()
    assert set(copy.get_tree().files) == {"results/pretrain.npz"}
    newer = make_copy("c", epoch=1, generation=copy.describe_for_new_process().generation)
    newer.put(write(newer, "results/rl.npz", "made again"))
    writer.collect_from(lambda: newer.list_put(0))
    writer.close()
    assert (copy.path / "results/rl.npz").read_text() == "made again"
    assert set(copy.get_tree().files) == {"results/pretrain.npz", "results/rl.npz"}


def test_a_worker_that_lives_on_makes_a_deleted_result_again(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    writer.commit()
    worker = make_copy("b", epoch=1, generation=copy.describe_for_new_process().generation)
    writer.collect_from(lambda: worker.list_put(0))
    with writer.hold():
        writer.add_deleted(copy.path / "results/rl.npz", "the run was cut")
    worker.put(write(worker, "results/rl.npz", "requested before the cut"))
    writer.commit()
    assert not copy.get_tree().files
    worker.generation = copy.raise_generation()
    worker.put(write(worker, "results/rl.npz", "made again"))
    writer.close()
    assert (copy.path / "results/rl.npz").read_text() == "made again"


def test_two_commits_at_once_ask_the_workers_one_after_the_other(make_copy: CopyMaker):
    writer, asking, most = RunWriter(make_copy("a")), list[int](), list[int]()

    def collect() -> list[tuple[str, FileEntry]]:
        asking.append(1)
        most.append(len(asking))
        time.sleep(0.05)
        asking.pop()
        return []

    writer.collect_from(collect)
    threads = [threading.Thread(target=writer.commit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
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


def test_after_a_cut_a_node_has_no_result_that_the_run_does_not_have(make_copy: CopyMaker):
    copy = make_copy("a")
    writer = RunWriter(copy)
    worker, other = (
        make_copy(node, epoch=1, generation=copy.describe_for_new_process().generation) for node in "bc"
    )
    for name, place in (("cut", worker), ("replaced", worker), ("kept", worker)):
        place.put(write(place, f"results/{name}.npz", "of the first"))
    counts = {worker: 0, other: 0}

    def collect() -> list[tuple[str, FileEntry]]:
        entries = [(copy, copy.list_put(start)) for copy, start in counts.items()]
        counts.update({copy: counts[copy] + len(new) for copy, new in entries})
        return [entry for _, new in entries for entry in new]

    writer.collect_from(collect)
    writer.commit()
    for name in ("cut", "replaced"):
        remove(writer, copy.path / f"results/{name}.npz")
    other.generation = copy.raise_generation()
    other.put(write(other, "results/replaced.npz", "of the second"))
    writer.commit()
    worker.match_results()
    assert {path.stem: path.read_text() for path in (worker.path / "results").iterdir()} == {
        "replaced": "of the second",
        "kept": "of the first",
    }
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
