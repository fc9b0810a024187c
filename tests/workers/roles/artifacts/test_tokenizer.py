"""What the tokenise stage says of the ring, and what it writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ring_world import Ring

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.scenario.settings import describe_unknown_items
from nonet.controller.setup.run_files import make_data_setup
from nonet.errors import DataError
from nonet.models.generation.corpus import Corpus
from nonet.samples.preparation import BuildOptions, EventLog
from nonet.samples.sequences import build_sequences
from nonet.samples.sequences.sequences import TEST, TRAIN, Sequences
from nonet.workers.roles.artifacts import DataSetup, make_sequences, store_artifact
from nonet.workers.roles.artifacts.tokenizer import Tokeniser, describe_data


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


def test_facts_are_those_of_the_tables(ring):
    data, corpus = ring.facts["data"], ring.corpus()
    liked = corpus.seq.columns["rating"] >= 4
    assert {
        name: data[name] for name in ("users", "items", "events", "trained_events", "users_only_trained")
    } == {
        "users": 60,
        "items": 40,
        "events": 960,
        "trained_events": 720,
        "users_only_trained": 0,
    }
    held_out = {"rl": 120, "valid": 60, "test": 60, "test_target": int(liked[corpus.seq.split == TEST].sum())}
    assert data["held_out"] == held_out
    assert data["train_span_s"] == 11 * 3600  # twelve events, an hour apart
    assert data["train_spread"] == 0.0
    assert data["labelled_events"] == {"finetune": int((corpus.seq.split == TRAIN).sum())}
    assert data["trained_share"] == {"finetune": pytest.approx(liked[corpus.seq.split == TRAIN].mean())}


def test_data_are_read_as_the_scenario_says(ring):
    def built(*changes):
        scenario, beside = load_scenario(ring.scenario, list(changes))
        return make_data_setup(scenario, beside).build()

    seq, items = built()
    assert (len(seq), len(items), len(seq.item)) == (60, 40, 960)
    assert set(seq.targets) == {"finetune"}
    assert np.array_equal(seq.targets["finetune"], seq.columns["rating"] >= 4)
    liked, _ = built("data.where='rating >= 4'")
    assert 0 < len(liked.item) == int((seq.columns["rating"] >= 4).sum())
    often, fewer = built("data.keep={item_events: 24}")
    assert 0 < len(fewer) < 40
    assert np.bincount(often.item).min() >= 24
    later, _ = built("data.split={use: leave_last_out, test: 3, valid: 2, rl: 1}")
    assert np.bincount(later.split).tolist() == [600, 60, 120, 180]


def test_artifacts_are_one_corpus(ring):
    corpus = ring.corpus()
    assert corpus.sids.shape == (40, 3)  # two levels, and the one for collisions
    assert len({tuple(sid) for sid in corpus.sids.tolist()}) == 40
    assert corpus.codes[:2] == (6, 6)
    assert corpus.item_id.tolist() == list(range(1000, 1040))
    node = np.zeros(40, np.int64)
    for level in range(corpus.trie.levels):
        first = corpus.trie.first_child[level]
        for item in range(40):
            children = slice(first[node[item]], first[node[item] + 1])
            codes = corpus.trie.code[level][children].tolist()
            node[item] = first[node[item]] + codes.index(corpus.sids[item, level])
    assert corpus.trie.item_of_leaf[node].tolist() == list(range(40))


def test_the_same_content_lands_in_the_same_folder_and_other_content_does_not(tmp_path):
    def write(text):
        return store_artifact(tmp_path, "kind", lambda folder: (folder / "file").write_text(text))

    one, again, other = write("a"), write("a"), write("b")
    assert one == again
    assert one["sha256"] != other["sha256"]
    assert Path(one["path"]).name == f"kind-{one['sha256'][:8]}"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        Path(found["path"]).name for found in (one, other)
    )


def leave_draft(root: Path, kind: str) -> None:
    """Leave a part of an artifact, as a process does that is killed before it is complete."""
    draft = root / f"tmp-{kind}-0123abcd"
    draft.mkdir()
    (draft / "file").write_text("half")


def test_what_an_error_has_left_of_an_artifact_is_deleted(tmp_path):
    def write(folder):
        (folder / "file").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store_artifact(tmp_path, "kind", write)
    assert not list(tmp_path.iterdir())


def test_an_artifact_of_which_a_killed_process_has_left_a_part_is_written_anew(tmp_path):
    leave_draft(tmp_path, "kind")
    leave_draft(tmp_path, "other")
    assert len(list(tmp_path.glob("tmp-*"))) == 2
    artifact = store_artifact(tmp_path, "kind", lambda folder: (folder / "file").write_text("a"))
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"tmp", "kind"}
    assert not list(tmp_path.glob("tmp-kind-*"))
    assert (Path(artifact["path"]) / "file").read_text() == "a"


@pytest.mark.parametrize("how", ["memory", "disk"])
def test_the_stage_begins_without_what_a_killed_attempt_has_left(ring, tmp_path, how, monkeypatch):
    leave_draft(tmp_path, "transitions")
    setup = make_data_setup(*load_scenario(ring.scenario, [f"data.prepare={how}"]))
    builds = []
    method = "prepare_on_disk" if how == "disk" else "build_with_facts"
    build = getattr(DataSetup, method)

    def find_drafts(*arguments):
        builds.append(list(tmp_path.glob("tmp-*")))
        return build(*arguments)

    monkeypatch.setattr(DataSetup, method, find_drafts)
    make_sequences(setup, tmp_path)
    assert builds == [[]]


def test_a_corpus_is_opened_from_its_artifacts(ring):
    assert set(ring.folders) == {"sequences", "sids", "catalogue", "transitions"}
    assert Corpus.load(ring.folders).trie.version == ring.corpus().trie.version


@pytest.mark.parametrize("name", ["quickstart"])
def test_a_shipped_scenario_has_the_same_artifacts_prepared_on_disk_as_in_memory(tmp_path, name):
    """The same sequences, to the bit, mapped; so the same ids, catalogue and counts, and whatever a run does with them."""
    facts = {}
    for how in ("memory", "disk"):
        changes = [f"data.prepare={how}", "tokenizer.vectors=[categories]", "tokenizer.codes=16"]
        scenario, beside = load_scenario(name, changes)
        facts[how] = Tokeniser().prepare(make_data_setup(scenario, beside), str(tmp_path / how))
    memory, disk = facts["memory"], facts["disk"]
    for kind in ("sids", "catalogue", "transitions"):
        assert disk["artifacts"][kind]["sha256"] == memory["artifacts"][kind]["sha256"], kind
    assert disk["data"] == memory["data"]
    built, mapped = (Sequences.load(facts[how]["artifacts"]["sequences"]["path"]) for how in facts)
    assert isinstance(mapped.item, np.memmap)
    for field in ("user_id", "offsets", "item", "time", "split", "user_key", "item_key", "train_lengths"):
        np.testing.assert_array_equal(getattr(mapped, field), getattr(built, field), field)
    assert mapped.repeats == built.repeats
    for stage, mask in built.targets.items():
        np.testing.assert_array_equal(mapped.targets[stage], mask)


@pytest.mark.parametrize("how", ["memory", "disk"])
def test_facts_count_the_events_of_unknown_items(ring, tmp_path, how):
    items = pq.read_table(ring.scenario.parent / "items.parquet")
    pq.write_table(items.slice(3), tmp_path / "items.parquet")
    changes = [f"data.prepare={how}", f"data.items={tmp_path / 'items.parquet'}", "data.unknown_items=drop"]
    changes += ["data.events={compress: 1d}"]
    scenario, beside = load_scenario(ring.scenario, changes)
    facts = Tokeniser().prepare(make_data_setup(scenario, beside), str(tmp_path / how))["data"]
    counts = facts["unknown_items"]
    assert (counts["items"], counts["of"]) == (3, 960)
    assert 0 < counts["events"] == 960 - facts["compressed"]["rows"]
    assert f"{counts['events']} of 960 interactions name one of 3 items" in describe_unknown_items(facts)


def test_what_the_driver_does_not_read_is_refused_where_it_is_read(ring, tmp_path):
    scenario, beside = load_scenario(
        ring.scenario, ["data.prepare=disk", "stages.finetune.target='rating > 99'"]
    )
    with pytest.raises(DataError, match=r"stages.finetune.target: .* holds for none of the 720 training"):
        Tokeniser().prepare(make_data_setup(scenario, beside), str(tmp_path))


def test_facts_count_the_copies_of_events(tmp_path):
    rows = [(user, place, 1_600_000_000 + place) for user in range(9) for place in range(6)]
    columns = [list(column) for column in zip(*(rows + rows[:7]), strict=True)]
    table = pa.table(dict(zip(("user_id", "item_id", "timestamp"), columns, strict=True)))
    split = {"use": "leave_last_out", "test": 1, "valid": 1, "rl": 0}
    seq, items = build_sequences(table, None, split=split)
    pq.write_table(table, tmp_path / "log.parquet")
    data = SimpleNamespace(options=BuildOptions(str(tmp_path / "log.parquet")), known=None)
    facts = describe_data(seq, items, data)["data"]
    assert (facts["duplicates"], facts["time_unit"]) == (7, "s")


@pytest.mark.parametrize(
    ("times", "name", "unit"),
    [
        (pa.array([1_772_928_000_000, 5]), "at", "ms"),
        (pa.array([1_772_928_000_000]), "at_us", "us"),
        (pa.array(["1772928000000"]), "at", "ms"),
        (pa.array(["2026-03-08T00:00:00Z"]), "at", "s"),
        (pa.array([1_772_928_000_000_000], pa.timestamp("us")), "at", "s"),
        (pa.array([20260308]), "at", "s"),
    ],
)
def test_the_unit_of_a_log_is_that_of_its_numbers(tmp_path, times, name, unit):
    ids = pa.array([1] * len(times))
    pq.write_table(pa.table({"user_id": ids, "item_id": ids, name: times}), tmp_path / "log.parquet")
    assert EventLog(str(tmp_path / "log.parquet"), {"time": name}).find_time_unit() == unit
