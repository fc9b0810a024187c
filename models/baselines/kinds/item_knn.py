"""The keys of item KNN (`models/baselines/_implicit.py`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nonet.models.baselines.kinds.base import BaselineSpec, require_implicit
from nonet.options import Positive, StrictModel


class ItemKnnOptions(StrictModel):
    """The keys of item KNN."""

    neighbours: Annotated[Positive, Field(description="number of most similar items of an item")] = 100


SPEC = BaselineSpec("nonet.models.baselines._implicit:ItemKnn", ItemKnnOptions, check_items=require_implicit)
