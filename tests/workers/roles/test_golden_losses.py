"""The first losses of every stage are those that were stored: `python tests/workers/golden_losses.py --write` stores anew."""

from __future__ import annotations

import json

import pytest
from golden_losses import FILE, STEPS, first_losses

# Other CPUs sum in another order. Weights that differ by one float32 rounding (1e-7) move these numbers by less than 1e-6,
# norms of RL by 6e-6; kl is a sum of differences of log-probabilities, of which one rounding is 2e-6 in all.
CLOSE = {"rel": 1e-5, "abs": 1e-7}
CLOSE_RL = {"rel": 3e-5, "abs": 5e-6}


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    return first_losses(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("stage", list(STEPS))
def test_the_first_losses_of_a_stage_are_those_that_were_stored(stage, losses):
    stored = json.loads(FILE.read_text())[stage]
    assert len(losses[stage]) == len(stored) == STEPS[stage]
    for step, (record, expected) in enumerate(zip(losses[stage], stored, strict=True)):
        assert record == pytest.approx(expected, **(CLOSE_RL if stage == "rl" else CLOSE)), (
            f"{stage}, step {step}"
        )


def test_what_is_stored_has_learned_something_and_moved_from_its_reference():
    stored = json.loads(FILE.read_text())
    assert stored["pretrain"][-1]["loss"] < stored["pretrain"][0]["loss"]
    assert stored["rl"][0]["kl"] == 0 < stored["rl"][1]["kl"] < stored["rl"][2]["kl"]
