"""The interface of a recommender that rollout, trainer and evaluator use.

A model reads a user's events and predicts, level by level, the next code of a semantic id. Its logits cover all codes of a
level; which of them are legal is determined by the catalogue (nonet.models.generation.trie).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nonet.types import SampleBatch

# Shapes: B sequences, N events, T positions, M targets, m the targets computed at a level, A states from which each target is
# predicted, U prompts, W beams, L levels, K codes of a level, D width.


class PromptCache(Protocol):
    """The read-only result of a prefill, from which steps decode."""

    @property
    def state(self) -> Tensor:
        """State [U, D] that predicts the next item of each prompt."""
        ...

    def select_prompts(self, start: int, stop: int) -> Self:
        """Return the cache of the prompts [start, stop)."""
        ...


@runtime_checkable
class SidModel(Protocol):
    """An nn.Module that recommends by semantic ids.

    `rows` maps each sparse feature to its rows: [N, dim] aligned with the events of the batch, or [B, dim] aligned with the
    sequences. A model raises an error if `rows` lacks one of its `features`.
    """

    levels: int
    codes: tuple[int, ...]
    width: int

    @property
    def features(self) -> Mapping[str, int]:
        """Width of the rows by sparse feature."""
        ...

    # --- training -----------------------------------------------------------------------------------------------

    def states(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> Tensor:
        """Compute states [T, D], differentiable: one at the start of each sequence, then one after each of its events."""
        ...

    def targets(self, batch: SampleBatch) -> Tensor:
        """Return the semantic ids [M, L] of the events whose loss_mask is True, in order."""
        ...

    def target_positions(self, batch: SampleBatch, ahead: int = 1) -> Tensor:
        """Return the position [M] of the state that predicts each target from `ahead` events earlier.

        1 is the state directly before the target. Negative where the sequence has none.
        """
        ...

    def teacher_forced_logits(
        self,
        batch: SampleBatch,
        state_TD: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
        choices: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Yield for each level the logits [m, A, K] after the target's codes of the earlier levels.

        Args:
            batch: The batch that contains the targets.
            state_TD: Result of `states` for the batch.
            position_MA: Positions of the A states that each target is predicted from; the logits of negative ones are undefined.
            sid_ML: Semantic ids of the targets.
            choices: For each level, the indices [m] of the targets to compute.
        """
        ...

    def hidden_matrices(self) -> Sequence[nn.Parameter]:
        """Return the weights between hidden states, which Muon updates; AdamW updates all others."""
        ...

    # --- generating ---------------------------------------------------------------------------------------------

    def prefill(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> PromptCache:
        """From each sequence's history, compute the cache that `step` reads; an empty history has only its start position."""
        ...

    def step(self, cache: PromptCache, codes: Tensor | Sequence[Tensor], level: int) -> Tensor:
        """Compute the logits [U, W, K] of a level after the codes [U, W, level] chosen so far.

        Exhaustive scoring passes codes that are equal for all prompts as an expanded tensor (stride 0 over U), so that their
        embeddings can be looked up once.
        """
        ...

    # Optional: `compute_legal_logits`, which exhaustive scoring calls instead of `step` if the model has it:
    #
    #     def compute_legal_logits(self, cache, level, prefix_ml, row_c, code_c) -> Tensor | None
    #
    # It returns the logits [U, c] of code_c[i] after the prefix prefix_ml[row_c[i]], where row_c is ascending. All prompts have
    # the same prefixes [m, level]. It returns None if it would not be faster than `step`.
    #
    # Optional: `extend`, which servers call instead of `prefill` for returning users if `extends` is True. `prefixes` are their
    # cached prefixes (None for none), and `batch` has the events after them. It returns the cache that steps need, and the longer
    # prefixes, which have an attribute `nbytes`:
    #
    #     def extend(self, batch, rows, prefixes) -> tuple[PromptCache, list[Prefix]]
