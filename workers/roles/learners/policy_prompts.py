"""PolicyPrompts: the prompts of an RL step on one rank as batches, with their targets, feedback and votes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.models.generation import Votes, compute_similarity_weights
from nonet.samples.batches import locate_events, make_prompt_batch
from nonet.types import SampleBatch
from nonet.workers import FrozenPolicy, StepShare
from nonet.workers.roles import LearnerContext, StageSetup

# Shapes: U prompts, W beams, L levels, M unique keys, D width.


@dataclass(frozen=True)
class PolicyPrompts:
    """Makes batches of prompts, and looks up what their users took next.

    Attributes:
        context: Objects shared with the trainer.
        stage: The RL stage.
    """

    context: LearnerContext
    stage: StageSetup

    def make_share(self, beams: Mapping[str, Any], parts: Sequence[slice | np.ndarray]) -> StepShare:
        """Return this rank's prompts in chunks; each element of `parts` selects the prompts of one chunk."""
        batch_makers = [self._bind_batch(select_rows(beams, part)) for part in parts]
        return StepShare(batch_makers, self.context.run.features, self.context.device)

    def _bind_batch(self, beams: Mapping[str, Any]) -> Callable[[], SampleBatch]:
        """Return a function that makes the batch of the prompts of these beams."""
        return partial(
            make_prompt_batch,
            self.context.corpus.seq,
            self.context.corpus.sids,
            beams["user"],
            beams["position"],
            history=self.context.run.history,
            stage=self.stage.name,
        )

    def compute_votes(self, beams: Mapping[str, Any], frozen: FrozenPolicy | None = None) -> Votes | None:
        """Compute the memory's votes for the prompts; None without a memory.

        Args:
            beams: Rollouts of the prompts.
            frozen: The policy whose item rows are used; None for the live policy.
        """
        voters = self.context.voters
        if frozen is not None and voters is not None and voters.nearest:
            keys = torch.from_numpy(self.context.corpus.seq.get_item_keys(voters.items))
            voters = frozen.restore_voters(voters, self.context.run.features["item"], keys)
        if voters is None:
            return None
        votes = voters.compute_votes(
            self.context.corpus.seq,
            beams["user"],
            beams["position"],
            similarity_weights=compute_similarity_weights(self.context.model),
        )
        return votes.to(self.context.device)

    def find_targets(self, beams: Mapping[str, Any]) -> np.ndarray:
        """Return the semantic ids [U, L] of what each prompt's user took next."""
        corpus = self.context.corpus
        events = locate_events(corpus.seq, beams["user"], beams["position"])
        return corpus.sids[corpus.seq.item[events]]

    def find_hits(self, beams: Mapping[str, Any]) -> np.ndarray:
        """Return the mask [U, W] of the beams that are their prompt's target."""
        return (beams["sid"] == self.find_targets(beams)[:, None]).all(-1) & beams["valid"]

    def read_feedback(self, beams: Mapping[str, Any], column: str) -> np.ndarray:
        """Return the values of an interaction column for each prompt's next event, [U] float64."""
        events = locate_events(self.context.corpus.seq, beams["user"], beams["position"])
        return np.asarray(self.context.corpus.seq.columns[column][events], np.float64)


def restore_policy_rows(
    frozen: FrozenPolicy | None, keys: Mapping[str, Tensor], rows: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the rows [M, D] by table that a policy reads: the live rows, or those that a frozen policy stored."""
    return rows if frozen is None else frozen.restore_rows(keys, rows)


def select_rows(beams: Mapping[str, np.ndarray], part: slice | np.ndarray) -> dict[str, np.ndarray]:
    """Return the fields of some prompts, as contiguous arrays."""
    return {name: np.ascontiguousarray(values[part]) for name, values in beams.items()}
