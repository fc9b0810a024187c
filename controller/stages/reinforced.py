"""Reinforced stages (rl): rollouts answer prompts, rewards score the beams, trainers learn from the scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from nonet.controller.plan import (
    StageWork,
    feature_dims,
    gradient_moves,
    group_flops,
    holder,
    row_moves,
    sequence,
)
from nonet.controller.scenario import OwnWorkers, PlannedGroup, StageKind, StageOptions
from nonet.controller.stages._reinforced_options import BeamRollout, Reinforced
from nonet.errors import ConfigError
from nonet.plugins import is_reference
from nonet.workers.roles import SceneSetup

_FORWARD, _TRAINED = 2.0, 6.0  # flops a parameter and position
_BEAM_BYTES = 8  # a code of a level and its log-probability
_ITEM_BYTES = 30  # item, validity and what else a beam carries
_BEFORE = ("rollout", "reward")  # of a step, what staleness lets run beside the rest


class ReinforcedKind(StageKind):
    """So many steps of prompts, beams, scores and an update."""

    plan_name: ClassVar[str] = "rl"
    options: ClassVar[type[StageOptions]] = Reinforced
    loop: ClassVar[str] = "nonet.controller.stages._loops:run_reinforced"
    learner: ClassVar[str] = "nonet.workers.roles.learners:PolicyLearner"
    trainer_phases: ClassVar[tuple[str, str]] = ("update", "publish")
    rolls_out: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ("trainer", "rollout", "embedding", "name.")
    takes: ClassVar[tuple[str, ...]] = ("sequences", "catalogue")
    no_model: ClassVar[tuple[str, ...]] = ("nothing",)

    def can_claim(self, keys: set[str]) -> bool:
        """Return whether a stage with these keys and no `use` is reinforced."""
        return "rewards" in keys or (
            "steps" in keys and not keys & {"epochs", "tokens", "batch", "target", "ahead", "stop"}
        )

    def list_phases(self, body: Reinforced) -> dict[str, tuple[str, ...]]:
        """Return the roles that work at once, by phase."""
        if body.rollout.options().get("staleness"):
            return {"rollout + update": ("rollout", "reward", "trainer", "embedding", "evaluator")}
        return {
            "rollout": ("rollout", "evaluator"),
            "score": ("reward", "evaluator"),
            "update": ("trainer", "embedding", "evaluator"),
            # weights leave as bytes in host memory; rollout takes them when it works
            "publish": ("trainer", "embedding", "evaluator"),
        }

    def list_own_workers(self, stage: str, body: Reinforced) -> Iterator[OwnWorkers]:
        """Rewards, and steps between rollout and rewards."""
        for name, options in body.rewards.items():
            path = f"stages.{stage}.rewards.{name}"
            yield OwnWorkers(f"{stage}.reward.{name}", path, options.pool, options.workers)
        for index, step in enumerate(body.between):
            path = f"stages.{stage}.between.{index}"
            yield OwnWorkers(f"{stage}.between.{index}", path, step.pool, step.workers)

    def find_unsupported(self, path: str, body: Reinforced) -> Iterator[str]:
        """Yield keys that can be planned but not run."""
        if is_reference(str(body.rollout.use)):
            yield f"{path}.rollout.use: {body.rollout.use}"

    def check_groups(self, name: str, body: Reinforced, groups: tuple[PlannedGroup, ...]) -> None:
        """Raise ConfigError if stale rollouts share the trainer's weights."""
        staleness = body.rollout.options().get("staleness")
        if staleness and holder(groups, "rollout").name == holder(groups, "trainer").name:
            raise ConfigError(
                f"stages.{name}.rollout.staleness: {staleness} wants a rollout with weights of its own, and here it shares the "
                "trainer's live ones: set roles.rollout: {workers: 1} (and roles.embedding: {workers: 1}), or staleness: 0"
            )

    def check_data(self, name: str, body: Reinforced, seq: Any) -> None:
        """Raise ConfigError if the data lack the feedback column, RL events or the values of scenes."""
        from nonet.samples.batches import find_rl_events
        from nonet.samples.sequences import RL

        column = body.algorithm.spec.feedback_column(body.algorithm.options())
        if column is not None and column not in seq.columns:
            there = ", ".join(seq.columns) or "none"
            raise ConfigError(
                f"stages.{name}.algorithm.feedback is {column!r}; it must be a numeric column of the interactions: {there}"
            )
        if not (seq.split == RL).any():
            raise ConfigError(f"stages.{name} needs events held out for RL: set data.split.rl, e.g. rl: 5")
        if not len(find_rl_events(seq)):
            raise ConfigError(
                f"stages.{name}: all {int((seq.split == RL).sum())} events held out for RL return to an item their user has "
                "seen, and seen items are masked: set data.repeats: allow, or hold out more with data.split.rl"
            )
        if (setup := self.make_scenes(body)) is None:
            return
        scene = setup.of(seq, find_rl_events(seq))
        for index, value in enumerate(setup.names):
            if not (scene == index).any():
                raise ConfigError(
                    f"stages.{name}.scenes.of.{value}: no RL event has {value!r} as its {setup.column}"
                )

    def get_width(self, body: Reinforced) -> int:
        """Return the number of items for each prompt."""
        return int(body.rollout.options().get("width", BeamRollout().width))

    def make_rollout_options(self, body: Reinforced) -> dict[str, Any]:
        """Return the options of the rollout."""
        return {"use": body.rollout.use, **body.rollout.options()}

    def make_scenes(self, body: Reinforced) -> SceneSetup | None:
        """Return the scenes of the stage: one for all prompts if it only has a catalogue, None without either."""
        everywhere, scenes = body.rollout.options().get("catalogue"), body.scenes
        if scenes is None:
            return SceneSetup("", (), (everywhere,), ()) if everywhere else None
        weights = [
            dict.fromkeys(
                set(body.rewards) - set(body.rewards if scene.rewards is None else scene.rewards), 0.0
            )
            | scene.weights
            for scene in scenes.of.values()
        ]
        catalogues = (*(scene.catalogue or everywhere for scene in scenes.of.values()), everywhere)
        return SceneSetup(scenes.column, tuple(scenes.of), catalogues, tuple(weights))

    def needs_reference(self, body: Reinforced) -> bool:
        """Return whether the algorithm compares with the first weights of the stage."""
        return body.algorithm.spec.needs_reference(body.algorithm.options())

    def count_old_versions(self, body: Reinforced) -> int:
        """Return how many published versions trainers keep to correct stale rollouts."""
        staleness = int(body.rollout.options().get("staleness", 0))
        return staleness + 1 if body.mismatch is not None and staleness else 0

    def count_stored_row_steps(self, body: Reinforced) -> int:
        """Return the number of steps whose sparse rows trainers store before they change."""
        if body.sparse_lr is None:
            return 0
        moving = body.algorithm.options().get("reference")
        every = moving.get("every") if isinstance(moving, dict) else None
        kept = min(body.steps, every or body.steps) if self.needs_reference(body) else 0
        return kept + sum(range(self.count_old_versions(body)))  # the newest version is the policy itself

    def find_least_users(self, body: Reinforced) -> tuple[int | None, str]:
        """Return the users of a step and the key that sets them."""
        return body.users, "users"

    def count_unit_tokens(self, scenario: Any, body: Reinforced, size: Any) -> float:
        """Return the largest number of positions of one prompt: a full history and the codes of its beams."""
        return sequence(scenario, size) + self.get_width(body) * size.levels

    def count_units(self, body: Reinforced, workers: int) -> int:
        """Return the number of prompts of a worker in a step."""
        return -(-_count_prompts(body) // workers)

    def step_tokens(self, scenario: Any, body: Reinforced, size: Any) -> float:
        """Return the largest number of positions of a global step."""
        return _count_prompts(body) * self.count_unit_tokens(scenario, body, size)

    def derive_sizes(
        self, body: Reinforced, workers: Mapping[str, int], chunks: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the sizes of a worker and chunk that a plan prints."""
        width, staleness = self.get_width(body), body.rollout.options().get("staleness", 0)
        sizes = {
            "steps": body.steps,
            "users a step": _count_prompts(body),
            "beams a step": _count_prompts(body) * width,
            "users a rollout": self.count_units(body, workers["rollout"]),
            "beams a trainer": self.count_units(body, workers["trainer"]) * width,
            "prompts a rollout's chunk": chunks.get("rollout", 0),
            "prompts a trainer's chunk": chunks.get("trainer", 0),
        }
        return sizes | ({"steps that beams may be old": staleness} if staleness else {})

    def work(
        self, scenario: Any, name: str, body: Reinforced, groups: tuple[PlannedGroup, ...], size: Any
    ) -> StageWork:
        """Return the operations and transferred bytes of a step."""
        trainer, rollout = holder(groups, "trainer"), holder(groups, "rollout")
        tokens, histories = (
            self.step_tokens(scenario, body, size),
            _count_prompts(body) * sequence(scenario, size),
        )
        looked_at = _FORWARD if self.needs_reference(body) else 0.0
        update = (_TRAINED + looked_at) * size.parameters * tokens
        decode = _FORWARD * size.parameters * tokens
        fused = rollout.name == trainer.name
        flops = (
            (group_flops(trainer, update + decode),)
            if fused
            else (group_flops(trainer, update), group_flops(rollout, decode))
        )
        beams = float(_count_prompts(body) * self.get_width(body) * (size.levels * _BEAM_BYTES + _ITEM_BYTES))
        events = histories / size.positions_an_event
        moves = [("beams", beams, f"{rollout.name} -> rewards, {trainer.name}")]
        if not fused:
            weights = float(size.parameters * size.weight_bytes * rollout.workers)
            moves.append(
                ("dense weights", weights, f"{trainer.name} -> {rollout.workers} {rollout.name} workers")
            )
            read = events * sum(feature_dims(scenario).values()) * 4.0
            moves.append(("sparse rows read", read, f"-> {rollout.name}"))
        moves += [*row_moves(scenario, groups, events, 1), *gradient_moves(trainer, size)]
        return StageWork(
            name, body.steps, flops, tuple((what, count, way) for what, count, way in moves if count)
        )

    def compute_lengths(self, body: Reinforced, users: int, events: int) -> dict[str, Any]:
        """Return the arguments of StageSetup that follow from the data."""
        return {
            "steps": body.steps,
            "users": _count_prompts(body),
            "sparse_lr": body.sparse_lr,
            "algorithm": {"use": body.algorithm.address, **body.algorithm.options()},
            "mismatch": body.mismatch.model_dump() | _make_staleness(body) if body.mismatch else {},
            "weights": {reward: options.weight_at(body.steps) for reward, options in body.rewards.items()},
        }


def _make_staleness(body: Reinforced) -> dict[str, int]:
    """How many versions back beams may come from, so that trainers keep the weights of as many."""
    return {"staleness": int(body.rollout.options().get("staleness", 0))}


def _count_prompts(body: Reinforced) -> int:
    """Prompts of a step: the stage's users, and more where its algorithm drops some."""
    return math.ceil(body.users * body.algorithm.spec.oversample(body.algorithm.options()))


SPEC = ReinforcedKind()
