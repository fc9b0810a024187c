"""The keys of V-SKNN (`models/baselines/_v_sknn.py`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nonet.models.baselines.kinds.base import BaselineSpec
from nonet.options import Positive, StrictModel


class VSknnOptions(StrictModel):
    """The keys of V-SKNN."""

    neighbours: Annotated[
        Positive | None,
        Field(description="number of most similar sessions that vote; by default chosen by validation"),
    ] = None
    last: Annotated[
        Positive, Field(description="number of newest events of a history that are compared with sessions")
    ] = 20


SPEC = BaselineSpec("nonet.models.baselines._v_sknn:VSknn", VSknnOptions)
