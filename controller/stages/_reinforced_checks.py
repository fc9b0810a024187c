"""The checking part of reinforced stages: their items, groups and events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nonet.controller.scenario.parts import PlannedGroup, StageChecks
from nonet.controller.stages._reinforced_options import Reinforced
from nonet.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

    from nonet.samples.sequences import Sequences


class ReinforcedChecks(StageChecks):
    """The checks of stages that run RL steps."""

    def check_items(self, name: str, stage_options: Reinforced, items: pa.Table) -> None:
        """Raise ConfigError if a catalogue names a column that the items lack, or holds for no item."""
        if (setup := stage_options.kind.make_scenes(stage_options)) is not None:
            try:
                setup.find_allowed_items(items)
            except ConfigError as error:
                raise ConfigError(f"stages.{name}: {error}") from None

    def check_groups(self, name: str, stage_options: Reinforced, groups: tuple[PlannedGroup, ...]) -> None:
        """Raise ConfigError if stale rollouts share the trainer's weights."""
        staleness = stage_options.rollout.drawing.staleness
        if staleness and any({"rollout", "trainer"} <= set(group.roles) for group in groups):
            raise ConfigError(
                f"stages.{name}.rollout.staleness: {staleness} wants a rollout with weights of its own, and here it shares the "
                "trainer's live ones: set roles.rollout: {workers: 1} (and roles.embedding: {workers: 1}), or staleness: 0"
            )

    def check_data(self, name: str, stage_options: Reinforced, seq: Sequences) -> None:
        """Raise ConfigError if the data lack the feedback column, RL events or the values of scenes."""
        from nonet.samples.batches import find_rl_events
        from nonet.samples.sequences import RL

        column = stage_options.algorithm.spec.feedback_column(stage_options.algorithm.get_options())
        if column is not None and column not in seq.columns:
            columns = ", ".join(seq.columns) or "none"
            raise ConfigError(
                f"stages.{name}.algorithm.feedback is {column!r}; it must be a numeric column of the interactions: {columns}"
            )
        if not (seq.split == RL).any():
            raise ConfigError(
                f"stages.{name} needs events held out for RL: set data.split.rl, e.g. rl: 5, or rl: 7d with use: time"
            )
        if not len(find_rl_events(seq)):
            raise ConfigError(
                f"stages.{name}: all {int((seq.split == RL).sum())} events held out for RL return to an item their user has "
                "seen, and seen items are masked: set data.repeats: allow, or hold out more with data.split.rl"
            )
        if (setup := stage_options.kind.make_scenes(stage_options)) is None:
            return
        scene_by_event = setup.find_scenes(seq, find_rl_events(seq))
        for scene_index, scene_name in enumerate(setup.names):
            if not (scene_by_event == scene_index).any():
                raise ConfigError(
                    f"stages.{name}.scenes.of.{scene_name}: no RL event has {scene_name!r} as its {setup.column}"
                )
