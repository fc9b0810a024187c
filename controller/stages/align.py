"""Alignment stages: a supervised stage that also teaches a language model what semantic ids mean, before finetuning.

As in LC-Rec (Zheng et al. 2024), each step trains on histories and on some items, for which the model predicts the codes from
the words and the words from the codes. `stages: {align: {use: align, epochs: 1, items: 64}}`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from nonet.controller.scenario import StageOptions
from nonet.controller.stages.supervised import Supervised, SupervisedKind
from nonet.options import Positive, Rate


class Align(Supervised):
    """The keys of an alignment stage: those of a supervised stage, and those of its items."""

    kind_name: ClassVar[str] = "align"
    items: Annotated[
        Positive, Field(description="the number of items per step over all trainers, drawn by the seed")
    ] = 64
    weight_of_items: Annotated[
        Rate, Field(description="the weight of the mean loss of an item, relative to that of a target")
    ] = 1.0
    column: Annotated[str, Field(description="the column of the items with their words")] = "title"


class AlignKind(SupervisedKind):
    """The kind of alignment stages, which train on words and codes of items besides the histories of users."""

    options: ClassVar[type[StageOptions]] = Align
    learner: ClassVar[str] = "nonet.workers.roles.learners:AlignLearner"
    aligns: ClassVar[bool] = True

    def can_claim(self, keys: set[str]) -> bool:
        """Return False: a stage is of this kind only by `use`."""
        return False

    def list_item_columns(self, stage_options: Align) -> tuple[str, ...]:
        """Return the item column with the words."""
        return (stage_options.column,)

    def compute_lengths(self, stage_options: Align, users: int, events: int) -> dict[str, Any]:
        """Return the arguments of a supervised stage with those of the alignment loss."""
        align = {
            "items": stage_options.items,
            "weight": stage_options.weight_of_items,
            "column": stage_options.column,
        }
        return super().compute_lengths(stage_options, users, events) | {"align": align}


SPEC = AlignKind()
