"""The keys of EASE (`models/baselines/_ease.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from nonet.errors import DataError
from nonet.models.baselines.kinds.base import BaselineSpec
from nonet.options import StrictModel

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ITEMS = (
    20_000  # The weights are a dense matrix of items by items: 1.6 GB in fp32, of which fitting has two.
)


class EaseOptions(StrictModel):
    """The keys of EASE."""

    l2: Annotated[
        float | None,
        Field(gt=0, description="weight of the squared weights in the loss; by default chosen by validation"),
    ] = None


def _check_items(items: pa.Table, options: Mapping[str, Any]) -> None:
    """Raise DataError if the catalogue is too large for a dense matrix."""
    if len(items) > MAX_ITEMS:
        raise DataError(
            f"evaluate.baselines: ease: {len(items)} items, and it allows at most {MAX_ITEMS}, because its weights are a dense "
            "matrix; leave it out, or use item_knn"
        )


SPEC = BaselineSpec("nonet.models.baselines._ease:Ease", EaseOptions, check_items=_check_items)
