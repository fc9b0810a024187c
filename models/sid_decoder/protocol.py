"""SidModel: what rollout, trainer and evaluator ask of a recommender.

A model reads a user's events and answers, level by level, which code of a semantic id comes next. Its logits cover all
codes of a level; which of them are legal is the catalogue's matter (nonet.models.generation.trie).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from nonet.models.sid_decoder.beam_cache import Cache
from nonet.types import SampleBatch

# Shapes: B sequences, N events, M loss positions, U prompts, W beams, L levels, K codes of a level, D width.


@runtime_checkable
class SidModel(Protocol):
    """An nn.Module with these. `rows`: sparse feature -> its rows, [N, dim] aligned with the events of the batch, or
    [B, dim] aligned with the sequences; a feature that the model was built with and that is missing is an error.
    """

    levels: int
    codes: tuple[int, ...]

    @property
    def features(self) -> Mapping[str, int]: ...

    def forward(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> list[Tensor]:
        """Teacher-forced logits [M, K] of each level, one row for each event whose loss_mask is True, in order."""
        ...

    def targets(self, batch: SampleBatch) -> Tensor:
        """Semantic ids [M, L] that `forward` is asked for."""
        ...

    def prefill(self, batch: SampleBatch, rows: Mapping[str, Tensor]) -> Cache:
        """What steps need of each sequence's history; an empty sequence answers from its start position."""
        ...

    def step(self, cache: Cache, codes: Tensor | Sequence[Tensor], level: int) -> Tensor:
        """Logits [U, W, K] of a level after the codes [U, W, level] chosen so far.

        Codes that are one expanded row (stride 0 over U), as exhaustive scoring gives them, are looked up once.
        """
        ...
