"""`nonet items add`: a new version of a catalogue in which old items keep their ids and places."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ring_world import Ring
from run_folders import commit, folder_of
from served_run import TrainedRun

from nonet import yaml
from nonet.controller.setup import write_start
from nonet.deploy.after import add_items, items, recommend_for
from nonet.deploy.opened import OpenedRun
from nonet.deploy.verbs.data import add
from nonet.errors import ConfigError, DataError
from nonet.models.generation import ItemSignals, list_memory_files
from nonet.models.generation.corpus import Corpus
from nonet.workers.roles.evaluation.model_of_commit import load_recommender


@pytest.fixture
def run(tmp_path):
    """Make a run that has pretrained, and its world."""
    ring = Ring(tmp_path)
    run, world = folder_of(ring, tmp_path / "run"), ring.world()
    world.train("pretrain", 0, 3)
    return run, world, commit(run, world)


def table(tmp_path, ids, **columns) -> str:
    rows = {"item_id": ids, "title": [f"new {n}" for n in ids], "categories": [["kind1"]] * len(ids)}
    pq.write_table(pa.table(rows | columns), tmp_path / "new.parquet")
    return str(tmp_path / "new.parquet")


def test_new_items_stand_behind_and_old_ones_keep_places_and_ids(run, tmp_path):
    run, *_ = run
    before = Corpus.load(run.find_artifacts())
    made = add_items(str(run.path), table(tmp_path, [5001, 5002]), ["1003"])
    after = Corpus.load(run.find_artifacts())
    assert (made["number"], made["added"], made["withdrawn"], made["items"]) == (1, 2, 1, 41)
    assert after.item_id[:40].tolist() == before.item_id.tolist()
    assert after.item_id[40:].tolist() == [5001, 5002]
    assert (after.sids[:40] == before.sids).all()
    assert after.codes == before.codes
    assert len(np.unique(after.sids, axis=0)) == 42
    leaf = np.asarray(after.trie.leaf_of_item)
    assert np.flatnonzero(leaf < 0).tolist() == [3]
    assert after.trie.version == made["version"] != before.trie.version
    assert after.seq.get_item_keys(np.arange(40)).tolist() == before.seq.get_item_keys(np.arange(40)).tolist()


def test_what_new_items_lack_is_said(run, tmp_path, capsys):
    run, *_ = run
    table(tmp_path, [5001])
    path = tmp_path / "few.parquet"
    pq.write_table(pq.read_table(tmp_path / "new.parquet").drop_columns(["categories"]), path)
    add(str(run.path), str(path))
    assert "the new items have no categories, by which others are known: has " in capsys.readouterr().out
    add(str(run.path), table(tmp_path, [5002]))
    assert "the new items have no" not in capsys.readouterr().out


def test_a_new_version_answers_with_new_items_and_without_withdrawn_ones(run, tmp_path):
    run, world, folder = run
    add_items(str(run.path), table(tmp_path, [5001, 5002]), ["1003"])
    corpus = world.run.open_corpus(run.find_artifacts())
    asked = load_recommender(world.run, corpus, Path(folder))
    users, positions = np.arange(4), np.full(4, 10)
    beams = asked.generate_beams(asked.batch(users, positions), 42, users, positions)
    item = beams.item.numpy()
    assert not (item == 3).any()
    assert ((item == 40).any(1) & (item == 41).any(1)).all()
    shown = recommend_for(str(run.path), ["new 5001"], None, 41)["columns"]["pretrain"]
    assert "new 5002" in shown
    assert not any(title.endswith("d3") for title in shown)


def test_a_withdrawn_item_is_hidden_from_exports_and_tables_without_a_server(run):
    run, *_ = run
    assert OpenedRun.open(run.path).withdrawn == ()
    add_items(str(run.path), None, ["1003"])
    assert OpenedRun.open(run.path).withdrawn == ("1003",)


def test_what_was_withdrawn_comes_back_with_its_id(run, tmp_path):
    run, *_ = run
    before = Corpus.load(run.find_artifacts()).sids[3].tolist()
    add_items(str(run.path), None, ["1003"])
    made = add_items(str(run.path), table(tmp_path, [1003]))
    after = Corpus.load(run.find_artifacts())
    assert (made["number"], made["added"], made["put back"], made["items"]) == (2, 0, 1, 40)
    assert after.sids[3].tolist() == before
    assert len(json.loads((run.path / "catalogues.json").read_text())["versions"]) == 2


def test_vectors_of_new_items_are_read_beside_the_scenario(run, tmp_path):
    run, *_ = run
    (tmp_path / "shop").mkdir()
    write_start(run, tmp_path / "shop", "")
    document = yaml.parse(run.scenario.read_text(), "ring")
    document["tokenizer"] = {**document.get("tokenizer", {}), "vectors": ["ours.parquet"]}
    run.scenario.write_text(yaml.dump(document))
    ids = [*Corpus.load(run.find_artifacts()).item_id.tolist(), 5001]
    vectors = pa.table({"item_id": ids, "x": np.arange(len(ids)) % 7.0, "y": np.arange(len(ids)) % 3.0})
    pq.write_table(vectors, tmp_path / "shop" / "ours.parquet")
    assert add_items(str(run.path), table(tmp_path, [5001]))["added"] == 1


def test_wrong_items_are_told_and_nothing_changes(run, tmp_path):
    run, *_ = run
    path = str(run.path)
    with pytest.raises(DataError, match="1 of 2 items are in the catalogue already, the first is 1004"):
        add_items(path, table(tmp_path, [5001, 1004]))
    with pytest.raises(DataError, match="1 item ids occur more than once, the first: 5001"):
        add_items(path, table(tmp_path, [5001, 5001]))
    with pytest.raises(ConfigError, match="'77' is not in the catalogue"):
        add_items(path, None, ["77"])
    with pytest.raises(ConfigError, match="nothing changes"):
        add_items(path, None)
    assert not (run.path / "catalogues.json").exists()


def test_of_two_processes_that_change_the_catalogue_at_once_one_is_refused_and_nothing_is_undone(
    run, monkeypatch
):
    run, *_ = run
    real_find, refusals = items._find_withdrawn, list[str]()

    def find_while_another_process_adds(*arguments):
        monkeypatch.undo()
        with pytest.raises(ConfigError) as refused:
            add_items(str(run.path), None, ["1004"])
        refusals.append(str(refused.value))
        return real_find(*arguments)

    monkeypatch.setattr(items, "_find_withdrawn", find_while_another_process_adds)
    assert add_items(str(run.path), None, ["1003"])["items"] == 39
    assert "another process changes the catalogue of" in refusals[0]
    assert add_items(str(run.path), None, ["1004"])["items"] == 38


def open_signals(corpus) -> ItemSignals:
    return ItemSignals.map(list_memory_files(Path(corpus.folders["transitions"])))


def test_new_items_have_the_words_that_a_memory_compares(tmp_path):
    trained = TrainedRun(tmp_path)
    trained.commit()
    before = open_signals(Corpus.load(trained.folder.find_artifacts()))
    add_items(str(trained.folder.path), table(tmp_path, [5001, 5002]))
    after = Corpus.load(trained.folder.find_artifacts())
    signals = open_signals(after)
    assert len(signals) == len(before) + 2 == len(after.items)
    assert len(before.word) > 20
    assert signals.word[: len(before.word)].tolist() == before.word.tolist()
    assert signals.row[-1] > before.row[-1]  # the new items' kind is one of the words
    answer = recommend_for(str(trained.folder.path), [], None, 3, item_ids=["5001", "1003"])
    assert len(answer["columns"]["pretrain"]) == 3
