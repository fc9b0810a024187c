"""Reinforced stages (rl): rollouts generate beams for prompts, rewards score them, and trainers update the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from nonet.controller.scenario import StageKind, StageOptions, StepWork
from nonet.controller.scenario.parts import OwnWorkers
from nonet.controller.stages._reinforced_checks import ReinforcedChecks
from nonet.controller.stages._reinforced_options import Reinforced
from nonet.workers.roles import SceneSetup

if TYPE_CHECKING:
    from nonet.controller.scenario import Scenario
    from nonet.models import ModelSize

_FORWARD, _TRAINED = 2.0, 6.0  # FLOPs per parameter and position of a forward pass, and of a training step
_BEAM_BYTES = 8  # bytes per beam and level: the code and its log-probability
_ITEM_BYTES = 30  # bytes per beam: the item, the validity flag and the other fields


class ReinforcedKind(ReinforcedChecks, StageKind):
    """The kind of stages that run a fixed number of RL steps: generate beams, score them and update the policy."""

    plan_name: ClassVar[str] = "rl"
    options: ClassVar[type[StageOptions]] = Reinforced
    loop: ClassVar[str] = "nonet.controller.stages._reinforced_loop:run_reinforced"
    learner: ClassVar[str] = "nonet.workers.roles.learners:PolicyLearner"
    trainer_phases: ClassVar[tuple[str, str]] = ("update", "publish")
    rolls_out: ClassVar[bool] = True
    # "name." stands for the rewards of the stage and its steps between rollout and rewards.
    roles: ClassVar[tuple[str, ...]] = ("trainer", "rollout", "embedding", "name.")
    takes: ClassVar[tuple[str, ...]] = ("sequences", "catalogue")
    no_model: ClassVar[tuple[str, ...]] = ("nothing",)

    def can_claim(self, keys: set[str]) -> bool:
        """Return whether a stage with these keys and no `use` is reinforced."""
        return "rewards" in keys or (
            "steps" in keys and not keys & {"epochs", "tokens", "batch", "target", "ahead", "stop"}
        )

    def list_phases(self, stage_options: Reinforced) -> dict[str, tuple[str, ...]]:
        """Return the roles that work at the same time, by phase; stale rollouts overlap with the update in one phase."""
        if stage_options.rollout.drawing.staleness:
            return {"rollout + update": ("rollout", "reward", "trainer", "embedding", "evaluator")}
        return {
            "rollout": ("rollout", "evaluator"),
            "score": ("reward", "evaluator"),
            "update": ("trainer", "embedding", "evaluator"),
            # Weights are sent as bytes in host memory, which rollouts load when their own phase begins.
            "publish": ("trainer", "embedding", "evaluator"),
        }

    def list_own_workers(self, stage: str, stage_options: Reinforced) -> Iterator[OwnWorkers]:
        """Yield the workers of each reward and of each step between rollout and rewards."""
        for name, options in stage_options.rewards.items():
            path = f"stages.{stage}.rewards.{name}"
            yield OwnWorkers(f"{stage}.reward.{name}", path, options.pool, options.workers)
        for index, step in enumerate(stage_options.between):
            path = f"stages.{stage}.between.{index}"
            yield OwnWorkers(f"{stage}.between.{index}", path, step.pool, step.workers)

    def get_width(self, stage_options: Reinforced) -> int:
        """Return the number of beams that are generated for each prompt."""
        return stage_options.rollout.drawing.width

    def make_rollout_options(self, stage_options: Reinforced) -> dict[str, Any]:
        """Return the options of the rollout."""
        return {"use": stage_options.rollout.use, **stage_options.rollout.get_options()}

    def make_scenes(self, stage_options: Reinforced) -> SceneSetup | None:
        """Return the scenes of a stage (`Reinforced.make_scenes`)."""
        return stage_options.make_scenes()

    def needs_reference(self, stage_options: Reinforced) -> bool:
        """Return whether the algorithm needs a reference policy (a copy of the weights at the start of the stage)."""
        return stage_options.algorithm.spec.needs_reference(stage_options.algorithm.get_options())

    def count_old_versions(self, stage_options: Reinforced) -> int:
        """Return how many published versions of the weights the trainers keep to correct for stale rollouts."""
        staleness = stage_options.rollout.drawing.staleness
        return staleness + 1 if stage_options.mismatch is not None and staleness else 0

    def count_stored_row_steps(self, stage_options: Reinforced) -> int:
        """Return the number of steps for which trainers keep the original values of the sparse rows that were changed."""
        if stage_options.sparse_lr is None:
            return 0
        reference = stage_options.algorithm.get_options().get("reference")
        refresh_interval = reference.get("every") if isinstance(reference, dict) else None
        reference_steps = (
            min(stage_options.steps, refresh_interval or stage_options.steps)
            if self.needs_reference(stage_options)
            else 0
        )
        # A version that is k steps old needs the rows that changed in k steps; the newest one, with k = 0, is the policy.
        return reference_steps + sum(range(self.count_old_versions(stage_options)))

    def find_least_users(self, stage_options: Reinforced) -> tuple[int | None, str]:
        """Return the number of users of a step, and the key that sets it."""
        return stage_options.users, "users"

    def count_unit_tokens(self, scenario: Scenario, stage_options: Reinforced, size: ModelSize) -> float:
        """Return the largest number of positions of one prompt: a full history and the codes of its beams."""
        return (
            size.count_history_positions(scenario.data.history) + self.get_width(stage_options) * size.levels
        )

    def count_units(self, stage_options: Reinforced, workers: int) -> int:
        """Return the largest number of prompts of a worker in a step."""
        return -(-stage_options.count_prompts() // workers)

    def count_step_tokens(self, scenario: Scenario, stage_options: Reinforced, size: ModelSize) -> float:
        """Return the largest number of positions of a step over all workers."""
        return stage_options.count_prompts() * self.count_unit_tokens(scenario, stage_options, size)

    def derive_sizes(
        self, stage_options: Reinforced, workers: Mapping[str, int], chunks: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the sizes of a step, of a worker and of a chunk, by the description that a plan prints."""
        width = self.get_width(stage_options)
        staleness = stage_options.rollout.drawing.staleness
        sizes = {
            "steps": stage_options.steps,
            "users a step": stage_options.count_prompts(),
            "beams a step": stage_options.count_prompts() * width,
            "users a rollout": self.count_units(stage_options, workers["rollout"]),
            "beams a trainer": self.count_units(stage_options, workers["trainer"]) * width,
            "prompts a rollout's chunk": chunks.get("rollout", 0),
            "prompts a trainer's chunk": chunks.get("trainer", 0),
        }
        return sizes | ({"steps that beams may be old": staleness} if staleness else {})

    def estimate_work(self, scenario: Scenario, stage_options: Reinforced, size: ModelSize) -> StepWork:
        """Return an upper bound of the FLOPs, rows and bytes of a step."""
        prompts = stage_options.count_prompts()
        tokens = self.count_step_tokens(scenario, stage_options, size)
        reference_flops = _FORWARD if self.needs_reference(stage_options) else 0.0
        flops = {
            "trainer": (_TRAINED + reference_flops) * size.parameters * tokens,
            "rollout": _FORWARD * size.parameters * tokens,
        }
        events = prompts * size.count_history_positions(scenario.data.history) / size.positions_an_event
        beam_bytes = prompts * self.get_width(stage_options) * (size.levels * _BEAM_BYTES + _ITEM_BYTES)
        return StepWork(stage_options.steps, flops, events, row_directions=1, beam_bytes=float(beam_bytes))

    def compute_lengths(self, stage_options: Reinforced, users: int, events: int) -> dict[str, Any]:
        """Return the arguments of StageSetup that follow from the data."""
        return {
            "steps": stage_options.steps,
            "users": stage_options.count_prompts(),
            "sparse_lr": stage_options.sparse_lr,
            "algorithm": {"use": stage_options.algorithm.address, **stage_options.algorithm.get_options()},
            "mismatch": stage_options.mismatch.model_dump()
            | {"staleness": stage_options.rollout.drawing.staleness}
            if stage_options.mismatch
            else {},
            "weights": {
                reward: options.compute_weight(stage_options.steps)
                for reward, options in stage_options.rewards.items()
            },
        }


SPEC = ReinforcedKind()
