"""Questions after a run, over folders that were made in this process, without Ray."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from ring_world import Ring
from run_folders import commit, folder_of

from nonet.addresses import open_filesystem
from nonet.deploy.after import (
    combine_seeds,
    compare_runs,
    evaluate,
    evaluate_run,
    format_comparison,
    format_evaluation,
    format_seeds,
)
from nonet.errors import ConfigError, DataError
from nonet.samples.sequences import NEVER, TEST, TRAIN, Sequences
from tests.s3 import BUCKET, serve_s3


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="module")
def run(ring, tmp_path_factory):
    """Make a run that has pretrained, with its checkpoint."""
    run = folder_of(ring, tmp_path_factory.mktemp("run"))
    world = ring.world()
    world.train("pretrain", 0, 9)
    commit(run, world)
    return run


@pytest.fixture(scope="module")
def events(ring):
    return ring.corpus().seq.count_events()["test"]


def test_two_runs_are_compared_event_by_event(ring, events, tmp_path):
    best, worst = np.zeros(events, np.int64), np.full(events, 30)
    a = folder_of(ring, tmp_path / "a", pretrain=best)
    b = folder_of(ring, tmp_path / "b", pretrain=worst, popularity=best)
    answer = compare_runs(str(a.path), str(b.path))
    assert answer["events"] == events
    assert answer["a"] == {"run": "a", "subject": "pretrain"}
    for row in answer["metrics"].values():
        assert row["a"] == row["diff"] == row["low"] == 1.0
        assert row["b"] == 0.0
    assert "better in" in format_comparison(answer)
    same = compare_runs(str(a.path), str(b.path), stage_b="popularity")
    assert all(row["diff"] == 0 for row in same["metrics"].values())
    assert "No difference" in format_comparison(same)


def test_runs_over_other_test_events_are_refused(ring, events, tmp_path, tmp_path_factory):
    other = Ring(tmp_path_factory.mktemp("other"), users=20)
    a = folder_of(ring, tmp_path / "a", pretrain=np.zeros(events, np.int64))
    b = folder_of(
        other, tmp_path / "b", pretrain=np.zeros(other.corpus().seq.count_events()["test"], np.int64)
    )
    with pytest.raises(
        ConfigError,
        match=r"a and b were tested on different events: [\d,]+ and [\d,]+, [\d,]+ of them in common; their scenarios ask for "
        "the same, so their tables differ",
    ):
        compare_runs(str(a.path), str(b.path))
    scenario = (tmp_path / "b/scenario.yaml").read_text()
    (tmp_path / "b/scenario.yaml").write_text(scenario.replace("test: 1", "test: 2", 1))
    with pytest.raises(
        ConfigError, match=r"common; data.split.test is 1 in a and 2 in b: run one of them again"
    ):
        compare_runs(str(a.path), str(b.path))


def test_a_subject_that_was_not_ranked_is_named(ring, events, tmp_path):
    a = folder_of(ring, tmp_path / "a", pretrain=np.zeros(events, np.int64))
    with pytest.raises(ConfigError, match=r"a has no ranks of 'pretrian'; it has those of pretrain\."):
        compare_runs(str(a.path), str(a.path), stage_b="pretrian")


def test_a_run_is_evaluated_again_with_other_metrics(run):
    answer = evaluate_run(str(run.path), metrics=["recall@3", "mrr@5"])
    assert set(answer["subjects"]) == {"popularity", "transition_counter", "attribute_counter", "pretrain"}
    assert all(set(values) == {"recall@3", "mrr@5"} for values in answer["subjects"].values())
    assert "transition_counter" in format_evaluation(answer)
    with pytest.raises(ConfigError, match="unknown metric 'hits@3'"):
        evaluate_run(str(run.path), metrics=["hits@3"])


def test_its_own_data_again_gives_the_same_ranking_and_unknown_items_are_counted(run, ring, tmp_path):
    own = evaluate_run(str(run.path))
    table = pq.read_table(ring.scenario.parent / "interactions.parquet")
    pq.write_table(table, tmp_path / "interactions.parquet")
    again = evaluate_run(str(run.path), data=tmp_path)
    assert again["subjects"]["pretrain"] == own["subjects"]["pretrain"]
    assert again["data"]["dropped_events"] == again["data"]["trained_events"] == 0
    column = table.column_names.index("item_id")
    items = table["item_id"].to_numpy().copy()
    items[:7] += 10**6
    pq.write_table(table.set_column(column, "item_id", [items]), tmp_path / "interactions.parquet")
    assert evaluate_run(str(run.path), data=tmp_path)["data"]["dropped_events"] == 7
    pq.write_table(table.set_column(column, "item_id", [items + 10**6]), tmp_path / "interactions.parquet")
    with pytest.raises(DataError, match=r"none of its [0-9,]+ events has an item that"):
        evaluate_run(str(run.path), data=tmp_path)


def test_a_folder_of_parts_is_evaluated_and_events_of_the_training_are_warned_of(run, ring, tmp_path):
    table = pq.read_table(ring.scenario.parent / "interactions.parquet").sort_by("timestamp")
    older = table.slice(0, len(table) * 2 // 3)
    (tmp_path / "log").mkdir()
    pq.write_table(older.slice(0, 100), tmp_path / "log/part-0.parquet")
    pq.write_table(older.slice(100), tmp_path / "log/part-1.parquet")
    answer = evaluate_run(str(run.path), data=tmp_path / "log")
    assert answer["data"]["events"] == len(older)
    assert answer["data"]["trained_events"] > 0.9 * answer["data"]["test"] > 0
    assert f"warning: the run has trained on {answer['data']['trained_events']:,} of" in format_evaluation(
        answer
    )


def test_labels_of_other_data_are_read_beside_it(run, ring, tmp_path):
    labelled = run.path.with_name("labelled")
    shutil.copytree(run.path, labelled)
    scenario = (labelled / "scenario.yaml").read_text()
    labels = "labels: {path: bought.parquet, within: 1h, name: bought}"
    (labelled / "scenario.yaml").write_text(scenario.replace("\ndata:\n", f"\ndata:\n  {labels}\n", 1))
    table = pq.read_table(ring.scenario.parent / "interactions.parquet")
    pq.write_table(table, tmp_path / "interactions.parquet")
    with pytest.raises(
        DataError,
        match=rf"no such file .*labelled has labels that arrive later; write those of .* to {tmp_path}/bought",
    ):
        evaluate_run(str(labelled), data=tmp_path / "interactions.parquet")
    pq.write_table(table.select(["user_id", "item_id", "timestamp"]), tmp_path / "bought.parquet")
    assert evaluate_run(str(labelled), data=tmp_path)["data"]["dropped_events"] == 0
    pattern = evaluate_run(str(labelled), data=f"{tmp_path}/inter*.parquet")
    assert pattern["data"]["dropped_events"] == 0
    with serve_s3():
        for name in ("interactions", "bought"):
            system, path = open_filesystem(f"{BUCKET}/shop/{name}.parquet")
            with system.open_output_stream(path) as out:
                out.write((tmp_path / f"{name}.parquet").read_bytes())
        stored = evaluate_run(str(labelled), data=f"{BUCKET}/shop/interactions.parquet")
        assert stored["subjects"] == pattern["subjects"]
        with pytest.raises(DataError, match=rf"write those of .* to {BUCKET}/bought.parquet"):
            evaluate_run(str(labelled), data=f"{BUCKET}/shop")


def test_events_that_no_stage_trained_on_are_not_warned_of(run):
    trained = Sequences(
        user_id=np.arange(2),
        offsets=np.array([0, 3, 5]),
        item=np.arange(5, dtype=np.int32),
        time=np.arange(5),
        event=np.zeros(5, np.int32),
        split=np.array([TRAIN, TRAIN, TEST, TRAIN, TEST], np.int8),
        user_key=np.arange(2),
        item_key=np.arange(5),
        targets={"train": np.array([True, False, True, False, True])},
        columns={"label time:train": np.arange(5), "label end:train": np.array([0, 0, 0, NEVER, NEVER])},
    )
    tested = replace(trained, split=np.full(5, TEST, np.int8))
    model = SimpleNamespace(spec=SimpleNamespace(makes_lists=False))
    scenario = SimpleNamespace(model=model, stages={"train": None})
    learned = evaluate._find_learned_events(scenario, trained)
    assert learned.tolist() == [0, 1]
    assert evaluate._count_trained_events(tested, trained, learned) == 2
    model.spec.makes_lists = True
    assert evaluate._find_learned_events(scenario, trained).tolist() == [0]


def test_seeds_are_pooled_over_users_and_finished_ones_are_kept(ring, events, tmp_path):
    draws = {7: 0, 8: 12, 9: 30}
    started = []

    def start(seed, path):
        started.append(seed)
        ranks = np.full(events, draws[seed])
        made = folder_of(ring, path, pretrain=ranks, popularity=np.full(events, 30))
        made.write_json("report.json", {"baselines": {"popularity": {}}, "stages": {"pretrain": {}}})
        return True

    tmp_path /= "many"
    pooled = combine_seeds([7, 8], tmp_path, start)
    metric = next(iter(pooled["subjects"]["pretrain"]))
    assert pooled["subjects"]["pretrain"][metric]["values"] == [1.0, 0.0]
    assert pooled["paired"]["pretrain-popularity"][metric]["diff"] == 0.5
    combine_seeds([7, 8, 9], tmp_path, start)
    assert started == [7, 8, 9]
    assert json.loads((tmp_path / "seeds.json").read_text())["seeds"] == [7, 8, 9]
    assert "3 seeds (7, 8, 9)" in format_seeds(json.loads((tmp_path / "seeds.json").read_text()))
    with pytest.raises(ConfigError, match="--seeds must be different numbers"):
        combine_seeds([7, 7], tmp_path, start)
