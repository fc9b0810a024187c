"""The planning part of a stage kind: which groups work in a stage, and the sizes and the work of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OwnWorkers:
    """A group of workers that only one stage has: those of a reward, or of a step between rollout and rewards.

    Attributes:
        name: The name of the group.
        where: The path in the scenario of the options of the group, for messages.
        pool: The name of the pool; None for the default.
        workers: The number of workers.
    """

    name: str
    where: str
    pool: str | None
    workers: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """An upper bound of the work of one step, from the options of the stage and the shape of the model.

    Attributes:
        steps: The number of steps of the stage; 0 if it is known only after the data are read.
        flops: The number of floating-point operations of a step, by role.
        events: The number of events whose sparse rows are read in a step.
        row_directions: 1 if rows are only pulled; 2 if gradients are also pushed back.
        beam_bytes: The number of bytes of the beams that rollouts send in a step.
    """

    steps: int
    flops: Mapping[str, float]
    events: float
    row_directions: int
    beam_bytes: float = 0.0


class StagePlanning:
    """The methods of `StageKind` that a plan calls; by default, trainers learn from batches, and rollouts are idle."""

    def list_phases(self, stage_options: Any) -> dict[str, tuple[str, ...]]:
        """Return the roles that work at the same time, by phase; all other roles are idle in the phase.

        Args:
            stage_options: The options of the stage.

        Returns:
            The names of roles by phase; "reward" stands for all workers that the stage adds.
        """
        return {"train": ("trainer", "embedding", "evaluator")}

    def list_own_workers(self, stage: str, stage_options: Any) -> Iterator[OwnWorkers]:
        """Yield the groups of workers that only this stage has.

        Args:
            stage: The name of the stage.
            stage_options: The options of the stage.
        """
        return iter(())

    def get_width(self, stage_options: Any) -> int:
        """Return the number of beams per prompt; 0 if the stage does not roll out."""
        return 0

    def needs_reference(self, stage_options: Any) -> bool:
        """Return whether trainers keep a copy of the weights from the start of the stage, as a reference policy."""
        return False

    def count_old_versions(self, stage_options: Any) -> int:
        """Return how many published versions of the weights trainers keep, to correct for rollouts of older versions."""
        return 0

    def count_stored_row_steps(self, stage_options: Any) -> int:
        """Return for how many steps trainers store the old values of the sparse rows that these steps change; 0 if none."""
        return 0

    def find_least_users(self, stage_options: Any) -> tuple[int | None, str]:
        """Return the number of users of a step, None if the scenario does not fix it, and the key that sets it."""
        return None, "users"

    def count_unit_tokens(self, scenario: Any, stage_options: Any, size: Any) -> float:
        """Return the number of positions of one unit of work, which a chunk does not cut: 1 position, or a whole prompt.

        Args:
            scenario: The scenario.
            stage_options: The options of the stage.
            size: The shape of the model.
        """
        return 1.0

    def count_units(self, stage_options: Any, workers: int) -> int | None:
        """Return an upper bound of the number of units (`count_unit_tokens`) that a worker has in a step.

        Args:
            stage_options: The options of the stage.
            workers: The number of workers.

        Returns:
            The number of units; None if it follows only from the data.
        """
        return None

    @abstractmethod
    def count_step_tokens(self, scenario: Any, stage_options: Any, size: Any) -> float:
        """Return an upper bound of the number of positions of a step, over all workers.

        Args:
            scenario: The scenario.
            stage_options: The options of the stage.
            size: The shape of the model.
        """
        raise NotImplementedError

    def derive_sizes(
        self, stage_options: Any, workers: Mapping[str, int], chunks: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the sizes of a step, a worker and a chunk that a plan prints, by description.

        Args:
            stage_options: The options of the stage.
            workers: The number of workers of each role.
            chunks: The number of units in a chunk of each role; 0 if the role has no chunks.
        """
        return {}

    @abstractmethod
    def estimate_work(self, scenario: Any, stage_options: Any, size: Any) -> StepWork:
        """Estimate the work of a step.

        Args:
            scenario: The scenario.
            stage_options: The options of the stage.
            size: The shape of the model.
        """
        raise NotImplementedError
