"""Trainers and shards over real process groups, without Ray: the pipeline, policies and moves change no bit."""

from __future__ import annotations

import pytest

from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.worker_setup import make_run_setup
from nonet.embedding.slices import SLICES
from nonet.embedding.storage.checkpoint import load_table
from nonet.embedding.tables.factory import make_table

ACTS = [["begin", "pretrain"], ["train", "pretrain", 0, 7], ["train", "pretrain", 7, 18]]
POLICY = [
    "sparse.tables.user={dim: 8, admit: {count: 2}, evict: {ttl_steps: 5}, default: 0.01}",
    "sparse.tables.item={dim: 8, admit: {probability: 0.3}}",
]


class Plays:
    """Runs of a scenario by name: records of the first trainer, and the tables of its last commit whatever wrote them."""

    def __init__(self, scenario):
        self.scenario, self.folder = scenario, scenario.parent
        self.counts = {}

    def play(self, name, trainers, shards, changes=(), acts=ACTS):
        from forked_roles import played

        ranks = played(
            self.scenario, self.folder / name, [*acts, ["save", name]], changes=changes, trainers=trainers,
            shards=shards, data=self.folder,
        )  # fmt: skip
        self.counts[name] = [rank["counts"] for rank in ranks]
        return ranks[0]["records"], self.states(name, changes)

    def total(self, name, table, what):
        """Return what the first rank's tables counted over the whole run."""
        return sum(counts[table][what] for counts in self.counts[name][0])

    def states(self, name, changes):
        loaded, _ = load_scenario(self.scenario, list(changes))
        found = {}
        for table, spec in make_run_setup(loaded).make_table_specs().items():
            made = make_table(table, spec, 5)
            load_table(made, self.folder / name, [range(SLICES)])
            found[table] = made.hash_state()
        return found


@pytest.fixture(scope="module")
def plays(tmp_path_factory):
    from tests_ring import make_ring

    return Plays(make_ring(tmp_path_factory.mktemp("roles")) / "ring.yaml")


def test_two_trainers_and_two_shards_train_the_same_bits_with_the_pipeline_and_without(plays):
    on = plays.play("on22", 2, 2)
    assert len(on[0]) == 18
    assert on == plays.play("off22", 2, 2, ["sparse.in_flight=1"])


def test_one_trainer_carries_rows_in_flight_and_equals_the_fused_trainer(plays):
    fused = plays.play("fused", 1, 0)
    assert fused == plays.play("apart", 1, 2, ["sparse.in_flight=4"])


@pytest.mark.slow
def test_two_ranks_train_over_a_wire_of_bytes_and_not_to_the_same_bits(plays):
    exact, exact_rows = plays.play("fp32", 2, 0)
    rounded, rounded_rows = plays.play("int8", 2, 0, ["sparse.wire=int8"])
    assert rounded_rows != exact_rows, "nothing was rounded"
    losses = [[record["loss"] for record in records] for records in (exact, rounded)]
    assert losses[1] == pytest.approx(
        losses[0], rel=0.02
    )  # a row is off by 1/254 of its largest number at most
    assert rounded_rows == plays.play("int8apart", 2, 2, ["sparse.wire=int8"])[1], "whoever holds the rows"


@pytest.mark.slow
def test_policies_choose_alike_in_one_process_and_over_shards_and_go_on_at_another_count(plays):
    fused = plays.play("policy", 1, 0, POLICY)
    assert plays.total("policy", "user", "refused") > 0
    assert plays.total("policy", "user", "evicted") > 0
    half = [ACTS[0], ACTS[1]]
    plays.play("half", 1, 2, POLICY, half)
    rest = [["load", "half", "pretrain"], ACTS[2]]
    gone_on, states = plays.play("rest", 1, 3, POLICY, rest)
    assert (gone_on, states) == (fused[0][7:], fused[1])


@pytest.mark.slow
def test_rows_that_move_between_shards_while_a_stage_goes_on_change_no_bit(plays):
    fused = plays.play("fused", 1, 0, POLICY)
    acts = [ACTS[0], ["reshard", [2]], ACTS[1], ["reshard", [0, 1, 2]], ACTS[2], ["reshard", [1, 0]]]
    assert plays.play("moving", 1, 3, POLICY, acts) == fused
    held = [[count["user"]["rows"] for count in counts] for counts in plays.counts["moving"][1:]]
    assert held[0][2] == held[1][2] == 0 < held[2][2]  # one shard has every row
    assert all(shard[4] > 0 for shard in held)
    assert held[2][-1] == 0 < min(held[0][-1], held[1][-1])


@pytest.mark.slow
def test_tables_in_tiers_train_the_same_bits_as_in_memory_and_go_on_from_a_commit(plays, tmp_path):
    tiers = [
        "sparse.tables.user={dim: 8, tiers: {device_rows: 8, host_rows: 20}}",
        f"sparse.tables.user.tiers.folder={tmp_path}",
        "sparse.tables.item={dim: 8, tiers: {device_rows: 16, policy: lru}}",
    ]
    memory = plays.play("memory", 1, 0)
    assert plays.play("tiers", 1, 0, tiers) == memory
    last = plays.counts["tiers"][0][-1]
    assert last["user"]["rows"] == 60
    assert last["user"]["host_rows"] <= 20
    assert last["user"]["cold_rows"] >= 40
    assert last["user"]["device_rows"] == 8
    assert last["item"]["device_rows"] == 16
    half = [ACTS[0], ACTS[1]]
    plays.play("tiers-half", 1, 2, tiers, half)
    gone_on = plays.play("tiers-rest", 1, 0, tiers, [["load", "tiers-half", "pretrain"], ACTS[2]])
    assert gone_on == (memory[0][7:], memory[1])


@pytest.mark.slow
def test_a_click_model_admits_and_evicts_alike_fused_and_over_shards_with_batches_in_flight(tmp_path):
    from likes_world import make_likes

    policy = [
        "sparse.tables.user={admit: {count: 2}, evict: {ttl_steps: 9}}",
        "sparse.tables.item={features: [item, liked], admit: {probability: 0.2}, default: 0.01}",
    ]
    likes = Plays(make_likes(tmp_path) / "likes.yaml")
    acts = [["begin", "train"], ["train", "train", 0, 10]]
    fused = likes.play("fused", 1, 0, policy, acts)
    assert likes.total("fused", "user", "refused") > 0
    assert likes.total("fused", "item", "refused") > 0
    assert fused == likes.play("apart", 1, 2, policy, acts)
    on = likes.play("on22", 2, 2, acts=acts)
    assert on == likes.play("off22", 2, 2, ["sparse.in_flight=1"], acts)
