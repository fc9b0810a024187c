"""SidModel: what rollout, trainer and evaluator ask of a recommender.

A model reads a user's events and answers, level by level, which code of a semantic id comes next. Its logits cover all
codes of a level; which of them are legal is the catalogue's matter (nonet.models.generation.trie).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nonet.types import SampleBatch

# Shapes: B sequences, T positions, M targets, A states that each is asked from, U prompts, W beams, L levels, K codes, D width.


class PromptCache(Protocol):
    """What a prefill leaves for the steps, read-only; `state` [U, D] says how many prompts there are and where they lie."""

    @property
    def state(self) -> Tensor: ...

    def part(self, start: int, stop: int) -> Self:
        """The prompts [start, stop)."""
        ...


@runtime_checkable
class SidModel(Protocol):
    """An nn.Module with these. `rows`: sparse feature -> its rows, [N, dim] aligned with the events of the batch, or
    [B, dim] aligned with the sequences; a feature that the model was built with and that is missing is an error.
    """

    levels: int
    codes: tuple[int, ...]
    width: int

    @property
    def features(self) -> Mapping[str, int]: ...

    # --- training -----------------------------------------------------------------------------------------------

    def states(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> Tensor:
        """States [T, D], differentiable: of each sequence its start, then one after each of its events."""
        ...

    def targets(self, batch: SampleBatch) -> Tensor:
        """Semantic ids [M, L] of the events whose loss_mask is True, in order."""
        ...

    def target_positions(self, batch: SampleBatch, ahead: int = 1) -> Tensor:
        """Position [M] of the state `ahead` events before each target; below 0 where its sequence has none."""
        ...

    def teacher_forced_logits(
        self,
        batch: SampleBatch,
        state_TD: Tensor,
        position_MA: Tensor,
        sid_ML: Tensor,
        choices: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """By level the logits [m, A, K] after the codes before it, for the targets [m] that `choices` names there, from
        each of the A positions that a target is asked from; where that is below 0 what comes out means nothing.
        """
        ...

    def hidden_matrices(self) -> Sequence[nn.Parameter]:
        """The weights between hidden states, which Muon takes; AdamW takes the others."""
        ...

    # --- answering ----------------------------------------------------------------------------------------------

    def prefill(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> PromptCache:
        """What steps need of each sequence's history; an empty sequence answers from its start position."""
        ...

    def step(self, cache: PromptCache, codes: Tensor | Sequence[Tensor], level: int) -> Tensor:
        """Logits [U, W, K] of a level after the codes [U, W, level] chosen so far.

        Codes that are one expanded row (stride 0 over U), as exhaustive scoring gives them, are looked up once.
        """
        ...

    # A model may also have `legal_logits`, which exhaustive scoring asks in place of `step`. It must say the same:
    #
    #     def legal_logits(self, cache, level, prefix_ml, row_c, code_c) -> Tensor | None
    #
    # Logits [U, c] of code_c[i] after prefix_ml[row_c[i]], rows rising; prefixes [m, level] are the same for all prompts. None
    # where it has no faster way than `step`.
    #
    # And `extend` with `extends` True, which servers ask in place of `prefill` where a user comes back: of prefixes that were
    # kept and the events after them what steps need, and the longer prefixes, each with `nbytes`:
    #
    #     def extend(self, batch, rows, kept) -> tuple[PromptCache, list[Prefix]]
