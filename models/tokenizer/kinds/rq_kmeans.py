"""Semantic ids by residual k-means over the vectors of items."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nonet.models.tokenizer.kinds.base import TokenizerSpec
from nonet.options import Positive, Rate, StrictModel


class TextEncoder(StrictModel):
    """Options of text vectors that a transformers model on this machine computes (`nonet.models.hf`)."""

    use: Literal["hf"]
    path: Annotated[str, Field(description="a folder with config.json, safetensors and a tokenizer")]
    columns: Annotated[
        list[str], Field(min_length=1, description="columns of the item table with text or lists of text")
    ] = ["title"]
    pool: Annotated[
        Literal["mean", "last", "first"],
        Field(description="how a text's states become one vector: their mean, or the last or first of them"),
    ] = "mean"
    weight: Rate = 1.0


class RqKmeans(StrictModel):
    """Options of residual k-means."""

    vectors: list[str | dict[str, float] | TextEncoder] | str | dict[str, float] | TextEncoder = [
        "title",
        "categories",
        "cooccurrence",
    ]
    levels: Annotated[int, Field(ge=1, le=8)] = 3
    codes: Annotated[int, Field(ge=2, le=65536)] = 64
    dim: Positive = 64


SPEC = TokenizerSpec(
    "nonet.models.tokenizer.rq_kmeans:encode_items",
    RqKmeans,
    check="nonet.models.tokenizer.rq_kmeans:check_vectors",
    resolve_paths="nonet.models.tokenizer.rq_kmeans:resolve_paths",
    list_inputs="nonet.models.tokenizer.rq_kmeans:list_inputs",
    adds_items=True,
)
