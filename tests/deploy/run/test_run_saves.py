"""Commits that real workers write beside the steps of a loop: the bits of those that are waited for, and a kill amid one."""

from __future__ import annotations

import pytest
import ray

import nonet
from nonet.controller.record.checkpoint import Checkpoints, read_manifest
from nonet.controller.record.run_folder import RunFolder

APART = "roles={rollout: {workers: 1}, embedding: {workers: 2}, trainer: {workers: 2}}"


class KilledError(Exception):
    """The loop ends here."""


@pytest.fixture(scope="module")
def ring(ray_local, tmp_path_factory):
    from tests_ring import make_ring

    return make_ring(tmp_path_factory.mktemp("ring"))


def loop(ring, name: str, *changes: str, resume: bool = False, kill_after: int | None = None):
    """Run the RL stage by hand with a checkpoint every step; return the checkpoint folders and the step it continued from."""
    run, made = RunFolder(ring / name), [*changes, "checkpoint.every=1", "checkpoint.keep.last=9"]
    with nonet.Session(ring / "ring.yaml", folder=ring, run=run, changes=made, resume=resume) as s:
        began = s.restored.stage_step if s.restored else 0
        for step, prompts in s.iterate_prompts("rl"):
            beams = s.rollout.generate(prompts)
            s.trainer.update(s.stage, step, beams, s.reward.score(beams))
            s.publish()
            s.commit(step)
            if step == kill_after:
                for actor in s.trainer.group.hosts.actors:
                    ray.kill(actor)
                raise KilledError
    return run.checkpoints, began


def files(checkpoints) -> dict[str, dict[str, str]]:
    return {path.name: read_manifest(path).files for path in sorted(checkpoints.glob("step-*"))}


@pytest.mark.parametrize(
    "changes", [[], pytest.param([APART], marks=pytest.mark.slow)], ids=["fused", "apart"]
)
def test_a_run_killed_amid_a_save_goes_on_from_the_commit_before_to_the_same_bits(ring, changes):
    name = "apart" if changes else "fused"
    still, _ = loop(ring, f"{name}-still", *changes, "checkpoint.background=false")
    with pytest.raises(KilledError):
        loop(ring, f"{name}-killed", *changes, kill_after=1)
    left = ring / f"{name}-killed" / "checkpoints"
    assert Checkpoints(left).find_newest()[1].stage_step == 1, (
        "the commit of the second step was being written"
    )
    assert len(list(left.glob("tmp-*"))) == 1
    beside, began = loop(ring, f"{name}-killed", *changes, resume=True)
    assert began == 1
    assert not list(beside.glob("tmp-*"))
    assert files(beside) == files(still)
    assert len(files(still)) == 4
