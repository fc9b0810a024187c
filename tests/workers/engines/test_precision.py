"""bf16 and fp16 steps, the scale of their losses, steps that are skipped, and gradients of rows cut with the dense ones."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from forked_roles import played
from ring_world import Ring

from nonet.controller.scenario import check_scenario
from nonet.controller.scenario.scenario import load_scenario
from nonet.errors import ConfigError
from nonet.workers.engines import PrecisionOptions, StepPrecision
from nonet.workers.runtime import Membership

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
OVERFLOWS = "stages.pretrain.precision={use: fp16, scale: 1.0e+6, grow_every: 2}"


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


def test_the_scale_halves_where_gradients_overflow_and_doubles_after_so_many_steps():
    scale = StepPrecision(PrecisionOptions(use="fp16", scale=8.0, grow_every=2))
    for moved, expected in ((False, 4.0), (True, 4.0), (True, 8.0), (True, 8.0), (False, 4.0), (True, 4.0)):
        scale.update_loss_scale(moved)
        assert scale.scale == expected
    assert scale.get_state() == {"scale": 4.0, "moved": 1}
    plain = StepPrecision()
    plain.update_loss_scale(False)
    assert (plain.scale, plain.get_state()) == (1.0, {})


def test_gradients_are_unscaled_and_one_that_is_not_finite_is_told():
    scale, grads = (
        StepPrecision(PrecisionOptions(use="fp16", scale=4.0)),
        [torch.tensor([8.0]), torch.tensor([4.0])],
    )
    assert scale.unscale_gradients(grads)
    assert [grad.tolist() for grad in grads] == [[2.0], [1.0]]
    assert not scale.unscale_gradients([torch.tensor([1.0]), torch.tensor([float("inf")])])


@pytest.mark.parametrize("use", ["bf16", "fp16"])
def test_a_step_in_half_precision_is_near_one_in_full(ring, use):
    full, half = ring.world(), ring.world(f"stages.pretrain.precision={{use: {use}, scale: 128.0}}")
    losses, halves = ([record["loss"] for record in world.train("pretrain", 0, 4)] for world in (full, half))
    assert halves == pytest.approx(losses, rel=2e-2)
    assert halves != losses
    assert all(p.dtype == torch.float32 for p in half.trainer.model.parameters())


def test_a_skipped_step_moves_neither_dense_weights_nor_rows(ring):
    world = ring.world(OVERFLOWS)
    before, rows, seen = world.weights(), {}, []
    for step in range(12):
        (record,) = world.train("pretrain", step, step + 1)
        after, now = world.weights(), {key: row.tolist() for key, row in zip(*world.rows(), strict=True)}
        moved = any(now[key] != row for key, row in rows.items())
        assert bool(record["skipped"]) == torch.equal(before, after), step
        assert step == 0 or bool(record["skipped"]) != moved, step
        before, rows = after, now
        seen.append((record["skipped"], record["scale"]))
    assert [skipped for skipped, _ in seen][:2] == [1.0, 1.0]
    assert 0.0 in [skipped for skipped, _ in seen]
    assert seen[1][1] == seen[0][1] / 2
    assert torch.isfinite(before).all()


def test_a_rank_skips_what_another_rank_overflowed_in(ring):
    """The other rank is a sum that counts one more: its own gradients are finite here."""

    class Elsewhere(Membership):
        def sum_over_ranks(self, *values):
            return [value + 1.0 for value in values]

    world = ring.world("stages.pretrain.precision={use: fp16, scale: 128.0}")
    (first,) = world.train("pretrain", 0, 1)
    before = world.weights()
    world.trainer._member = Elsewhere(0, 1)
    world.trainer._learner.context = world.trainer._make_context()
    (second,) = world.train("pretrain", 1, 2)
    assert (first["skipped"], second["skipped"]) == (0.0, 1.0)
    assert torch.equal(world.weights(), before)


def test_a_commit_keeps_the_scale(ring, tmp_path):
    world, again = ring.world(OVERFLOWS), ring.world(OVERFLOWS)
    world.train("pretrain", 0, 12)
    folder = world.save(tmp_path / "half")
    state = json.loads((folder / "precision.json").read_text())
    assert state["scale"] < 1e6
    again.load(folder, "pretrain")
    assert [r["loss"] for r in again.train("pretrain", 12, 16)] == [
        r["loss"] for r in world.train("pretrain", 12, 16)
    ]
    assert torch.equal(again.weights(), world.weights())


def engines():
    """Those of two ranks; what divides weights takes longer."""
    return [
        "ddp",
        pytest.param("fsdp2", marks=pytest.mark.slow),
        pytest.param("deepspeed, zero: 1", marks=[pytest.mark.slow, NEEDS_DEEPSPEED]),
        pytest.param("deepspeed, zero: 2", marks=[pytest.mark.slow, NEEDS_DEEPSPEED]),
        pytest.param("deepspeed, zero: 3", marks=[pytest.mark.slow, NEEDS_DEEPSPEED]),
    ]


@pytest.mark.parametrize("engine", engines())
def test_two_ranks_skip_and_cut_as_one_process(ring, tmp_path, engine):
    """fp16 rounds what a rank adds up, so its losses differ by more than fp32's; which steps are skipped does not.

    The learning rate of fp16 is small: AdamW steps by the sign of gradients near zero, which rounding decides, and after six
    steps of the default rate the norms would differ by several times what a step rounds.
    """
    acts = [["begin", "pretrain"], ["train", "pretrain", 0, 6]]
    clip = "stages.pretrain.optimizer={use: adamw, clip: 0.05, clip_rows: true}"
    half = "stages.pretrain.precision={use: fp16, scale: 131072.0, grow_every: 2}"
    slowly = ["stages.pretrain.optimizer={use: adamw}", "stages.pretrain.lr=1e-5"]
    for changes, close, more in (([clip], 1e-5, ()), ([half, *slowly], 5e-3, ("skipped", "scale"))):
        folder = tmp_path / str(len(more))
        alone, two = (
            played(ring.scenario, folder / f"{ranks}", acts, trainers=ranks, changes=[*changes, *use])[0][
                "records"
            ]
            for ranks, use in ((1, []), (2, [f"roles.trainer={{engine: {{use: {engine}}}}}"]))
        )
        for name in ("loss", "norm", *more):
            assert [r[name] for r in two] == pytest.approx([r[name] for r in alone], rel=close), name
        if more:
            assert {record["skipped"] for record in alone} == {0.0, 1.0}


def test_rows_are_cut_with_the_dense_weights(ring):
    """The norm is over both; a rate of one for plain rows shows what they moved by."""
    plain, both = ring.world(), ring.world("stages.pretrain.optimizer={clip: 1.0e-3, clip_rows: true}")
    (one,), (cut,) = plain.train("pretrain", 0, 1), both.train("pretrain", 0, 1)
    assert cut["norm"] > one["norm"]
    assert cut["loss"] == one["loss"]


def test_what_cannot_run_is_refused_by_its_key(ring):
    for change, said in (
        ("stages.rl.precision={use: bf16}", "stages.rl.precision in a stage that rolls out"),
        ("stages.rl.optimizer={clip_rows: true}", "stages.rl.optimizer.clip_rows in a stage that rolls out"),
    ):
        scenario, _ = load_scenario(ring.scenario, [change])
        with pytest.raises(ConfigError, match=said):
            check_scenario(scenario)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method.:DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)  # torch's own compiler warns of itself
@pytest.mark.parametrize("engine", ["recompute: true", pytest.param("compile: true", marks=pytest.mark.slow)])
def test_blocks_that_are_recomputed_or_compiled_learn_the_same(ring, engine):
    changes = "model.dropout=0.2", "model.layers=2"
    plain, other = (
        ring.world(*changes),
        ring.world(f"roles.trainer={{engine: {{use: ddp, {engine}}}}}", *changes),
    )
    losses, others = ([r["loss"] for r in world.train("pretrain", 0, 4)] for world in (plain, other))
    assert others[0] == pytest.approx(
        losses[0], rel=1e-6 if "recompute" in engine else 0.2
    )  # other draws of dropout
    if "recompute" in engine:
        assert torch.equal(plain.weights(), other.weights())
    assert plain.trainer.model.state_dict().keys() == other.trainer.model.state_dict().keys()
