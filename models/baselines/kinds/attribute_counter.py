"""The attribute counter, a baseline without training (`_attribute_counter.py`): its keys, for processes that need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from nonet.models.baselines.kinds.base import BaselineSpec
from nonet.models.tokenizer import check_signals
from nonet.options import StrictModel

if TYPE_CHECKING:
    import pyarrow as pa


class AttributeCounterOptions(StrictModel):
    """The keys of the attribute counter."""

    columns: Annotated[
        list[str] | None,
        Field(
            description="columns of the items, text or lists of words, by which they are compared; all by default"
        ),
    ] = None


def _check_items(items: pa.Table, options: Mapping[str, Any]) -> None:
    """Raise DataError if a column is not one of words."""
    check_signals(options.get("columns") or (), items, "evaluate.baselines: attribute_counter: columns")


SPEC = BaselineSpec(
    "nonet.models.baselines._attribute_counter:AttributeCounter",
    AttributeCounterOptions,
    check_items=_check_items,
)
