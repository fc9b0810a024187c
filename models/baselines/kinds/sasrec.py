"""Options of SASRec in a scenario. The network is in `_sasrec.py`, its training in `_sasrec_training.py`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from nonet.models.baselines.kinds.base import BaselineSpec
from nonet.options import Count, Positive, StrictModel

FULL_SOFTMAX = 5000  # Up to this number of items, the softmax is over all of them.
# Learning rate, dropout and multiple of `width` of each trial, best guess first.
TRIALS = (
    (2e-3, 0.3, 1),
    (1e-3, 0.3, 1),
    (2e-3, 0.5, 1),
    (1e-3, 0.5, 1),
    (4e-3, 0.5, 1),
    (5e-4, 0.2, 1),
    (1e-3, 0.5, 2),
    (1e-3, 0.3, 2),
)


class SasRecOptions(StrictModel):
    """Options of the SASRec baseline."""

    epochs: Annotated[
        Positive,
        Field(description="maximum number of epochs; training stops when validation NDCG@10 stops improving"),
    ] = 40
    patience: Annotated[
        Positive, Field(description="epochs without a better validation NDCG@10 after which training stops")
    ] = 5
    trials: Annotated[
        int,
        Field(
            ge=1,
            le=len(TRIALS),
            description="number of settings of learning rate, dropout and width that are tried; after every doubling of their "
            "epochs, validation keeps the better half",
        ),
    ] = 1
    lr: Annotated[float | None, Field(gt=0, description="learning rate; by default that of the trial")] = None
    dropout: Annotated[float | None, Field(ge=0, lt=1, description="by default that of the trial")] = None
    width: Positive = 64
    layers: Positive = 2
    heads: Positive = 2
    users: Annotated[Positive, Field(description="maximum number of users per step")] = 128
    events: Annotated[
        Positive,
        Field(
            description="maximum number of training events per step; a user with more is a step of its own"
        ),
    ] = 2048
    negatives: Annotated[
        Count,
        Field(description="number of negatives that all targets of a step share, if the catalogue is large"),
    ] = 2048

    @model_validator(mode="after")
    def _check_width(self) -> SasRecOptions:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be heads ({self.heads}) times an even number")
        if self.trials > 1 and (self.lr is not None or self.dropout is not None):
            raise ValueError("trials choose lr and dropout; omit trials, or lr and dropout")
        return self

    def get_trial(self, trial: int) -> tuple[float, float, int]:
        """Return the learning rate, dropout and width of a trial."""
        lr, dropout, widths = TRIALS[trial]
        return self.lr or lr, dropout if self.dropout is None else self.dropout, widths * self.width


SPEC = BaselineSpec("nonet.models.baselines._sasrec_training:SasRec", SasRecOptions)
