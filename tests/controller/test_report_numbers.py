"""report.json's numbers out of the files that a run leaves."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nonet.controller.record.run_folder import RunFolder
from nonet.controller.record.validations import ValidationRecord
from nonet.controller.report import make_report
from nonet.controller.scenario.scenario import make_scenario

SCENARIO = make_scenario(
    {
        "name": "numbers",
        "data": {"interactions": "events.parquet", "split": {"use": "leave_last_out", "rl": 2}},
        "sparse": {"tables": {"item": {"dim": 8}}},
        "stages": {
            "pretrain": {"epochs": 1},
            "rl": {"steps": 4, "users": 2, "rewards": {"hit": {"weight": 1.0}}},
        },
    }
)


def found(all_, beam):
    """Make a subject's result: exhaustive and beam on all test events, other numbers elsewhere."""
    other = {"all": {"recall@10": 0.99}, "target": {"recall@10": 0.98}}
    exhaustive = {"all": {"recall@10": all_}, "target": {"recall@10": 0.97}}
    return {
        "detail": {
            "test": {"exhaustive": exhaustive, "beam": {"all": {"recall@10": beam}}},
            "valid": {"exhaustive": other},
        },
        "shown": [["a"]],
    }


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path)
    run.write_json("results/tokenise.json", {"data": {"users": 2}, "tokenizer": {}})
    for name, value in (("popularity", 0.1), ("transition_counter", 0.2), ("pretrain", 0.3), ("rl", 0.4)):
        run.write_json(f"results/{name}.json", found(value, value / 2))
    for when, scores in (("before", [0.0, 0.0, 0.5]), ("after", [1.0, 0.0, 1.0])):
        np.savez(
            run.results / f"rl.rewards.{when}.npz", hit=scores, total=2 * np.array(scores), user=[3, 3, 4]
        )
    run.metrics.write_text("")
    return run


def record(stage, step, name, value, role="trainer"):
    return json.dumps({"stage": stage, "step": step, "name": name, "value": value, "role": role}) + "\n"


def report(run):
    return make_report(run, SCENARIO, {"parameters": 5}, {}, {})


def test_a_subject_is_known_by_its_exhaustive_score_on_all_test_events(run):
    made = report(run)
    assert made["stages"] == {"pretrain": {"recall@10": 0.3}, "rl": {"recall@10": 0.4}}
    assert made["baselines"] == {"popularity": {"recall@10": 0.1}, "transition_counter": {"recall@10": 0.2}}
    assert made["detail"]["rl"]["test"]["beam"]["all"]["recall@10"] == 0.2
    assert json.loads(run.report.read_text())["stages"] == made["stages"]


def test_lists_memories_and_segments_stand_by_subject_and_data_tell_who_is_left_out(run):
    facts = {"tail items": {"events": 3, "items": 9}}
    memory = {"l": 0.2, "b": 0.7, "c": 1.2, "gain": {}}
    result = found(0.1, 0.1) | {"lists": {"coverage@10": 0.5}, "segments": facts}
    run.write_json("results/popularity.json", result)
    run.write_json("results/rl.json", result | {"memory": memory})
    run.write_json("results/tokenise.json", {"data": {"users": 8, "users_only_trained": 2}, "tokenizer": {}})
    made = report(run)
    assert made["lists"] == {"popularity": {"coverage@10": 0.5}, "rl": {"coverage@10": 0.5}}
    assert made["memory"] == {"rl": memory}
    assert made["segments"] == facts
    assert made["data"]["share_only_trained"] == 0.25


def test_a_reward_is_told_as_before_after_and_the_change_between_them(run):
    made = report(run)
    before, after, low, high = made["rewards"]["hit"]
    assert (before, after) == (pytest.approx(1 / 6), pytest.approx(2 / 3))
    assert 0 <= low <= after - before <= high
    assert made["rewards"]["total"][:2] == [pytest.approx(1 / 3), pytest.approx(4 / 3)]
    assert set(made["rewards"]) == {"hit", "total"}
    assert made["rewards_on"].startswith("3 prompts of 2 users")


def test_a_second_stage_with_rewards_has_its_numbers_too(run):
    plain = SCENARIO.model_dump(exclude_none=True, by_alias=True)
    two = make_scenario(plain | {"stages": plain["stages"] | {"again": plain["stages"]["rl"]}})
    for when, scores in (("before", [0.5, 0.5]), ("after", [1.0, 1.0])):
        np.savez(run.results / f"again.rewards.{when}.npz", hit=scores, total=scores, user=[3, 4])
    made = make_report(run, two, {"parameters": 5}, {}, {})
    assert {name: stage["rewards"]["hit"][1] for name, stage in made["stage_rewards"].items()} == {
        "rl": pytest.approx(2 / 3),
        "again": 1.0,
    }
    assert made["rewards"] == made["stage_rewards"]["again"]["rewards"]


@pytest.mark.parametrize(("floor", "held"), [(0.66, True), (0.68, True), (0.69, False)])
def test_a_floor_is_held_within_two_percent_for_users_that_rl_never_trains_on(run, floor, held):
    means = (0.9, 0.1, 0.1, 0.1, 0.1)
    run.metrics.write_text("".join(record("rl", step, "reward.hit", mean) for step, mean in enumerate(means)))
    stages = SCENARIO.model_dump(mode="python", exclude_none=True, by_alias=True)
    stages["stages"]["rl"]["rewards"]["hit"]["at_least"] = floor
    made = make_report(run, make_scenario(stages), {"parameters": 5}, {}, {})["floors"]["rl.hit"]
    assert (made["mean"], made["held"]) == (0.1, held)
    assert made["held_out"] == pytest.approx([1 / 6, 2 / 3])


def test_rows_and_table_counts_are_summed_over_steps_and_a_step_written_twice_counts_once(run):
    run.metrics.write_text(
        record("pretrain", 1, "events", 10)
        + record("pretrain", 2, "events", 20)
        + record("pretrain", 2, "events", 20)  # a resume
        + record("rl", 1, "prompts", 4)
        + record("pretrain", 1, "item.rows", 5, "embedding")
        + record("pretrain", 1, "item.admitted", 5, "embedding")
        + record("pretrain", 2, "item.rows", 7, "embedding")
        + record("pretrain", 2, "item.admitted", 2, "embedding")
        + record("rl", 1, "absent", 3, "rollout")
        + record("rl", 2, "absent", 4, "rollout")
        + '{"torn'
    )
    made = report(run)
    assert made["rows"] == {"pretrain": 30, "rl": 4}
    assert made["sparse"]["item"]["rows"] == 7
    assert made["sparse"]["item"]["admitted"] == 7
    assert made["absent_reads"] == 7


def test_validations_stand_beside_the_mean_training_loss_since_the_one_before(run):
    kept = ValidationRecord(run, "pretrain")
    for step, nats in ((20, 6.0), (40, 5.0)):
        kept.add(step, {"metrics": {"ndcg@10": step / 100}, "nats": nats, "events": 3})
    kept.close(metric="ndcg@10", best=40, ran=40, steps=90)
    losses = ((10, 4.0, 1), (20, 2.0, 3), (30, 9.0, 1), (30, 1.0, 1), (40, 2.0, 1), (50, 7.0, 1))
    run.metrics.write_text(
        "".join(
            record("pretrain", step, "loss", loss) + record("pretrain", step, "events", events)
            for step, loss, events in losses
        )
        + record("pretrain", 40, "validation nats", 5.0, "evaluator")
    )
    told = report(run)["validation"]
    assert list(told) == ["pretrain"]
    assert (told["pretrain"]["best"], told["pretrain"]["ran"], told["pretrain"]["steps"]) == (40, 40, 90)
    assert [entry["loss"] for entry in told["pretrain"]["history"]] == [2.5, 1.5], (
        "a step written twice counts once"
    )


def test_a_stages_share_of_the_machine_is_its_operations_over_what_products_would_have_done(run):
    sums = {"flops": 3e9, "could": 1e10, "seconds": 2.0, "positions": 500.0, "dense": 1.0, "sparse": 0.5}
    lines = [
        record("pretrain", step, f"machine {name}", value) for step in (1, 2) for name, value in sums.items()
    ]
    run.metrics.write_text("".join([*lines, lines[0]]))  # written twice by a resume
    machine = report(run)["machine"]["pretrain"]
    assert machine["mfu"] == pytest.approx(0.3)
    assert machine["tokens_per_s"] == pytest.approx(250.0)
    assert machine["matmul_flops_per_s"] == pytest.approx(5e9)
    assert machine["shares"] == pytest.approx({"dense": 0.5, "sparse": 0.25, "other": 0.25})
