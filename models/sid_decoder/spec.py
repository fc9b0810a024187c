"""The SID decoder's facts: its keys, its parameters (a test counts the real module's)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from nonet.models import ModelContext, ModelSize, ModelSpec, Options
from nonet.options import Positive, Share, StrictModel

# Of the depth decoder: rank and rows of its hashed code pairs; of the history decoder: buckets of gaps between events, of
# ratings, and kinds of events; of HSTU: buckets of its time bias.
DEPTH_RANK, DEPTH_ROWS = 16, 1 << 14
GAPS, RATINGS, TYPES = 28, 21, 32
TIME_BUCKETS = 64
_DEPTH_VECTORS = (
    16  # a level and position, at ahead: 3 (quickstart: 219 vectors a position are kept, with depth: mlp 154)
)


class SidDecoderOptions(StrictModel):
    """Options of the decoder of semantic ids."""

    width: Positive = 64
    layers: Positive = 3
    heads: Positive = 4
    dropout: Share = 0.1
    block: Annotated[
        Literal["attention", "hstu"],
        Field(
            description="of the history decoder: transformer blocks, or HSTU's gated pointwise attention with time bias"
        ),
    ] = "attention"
    depth: Annotated[
        Literal["mlp", "attention"],
        Field(
            description="how codes are decoded: from the last state alone, or attending to the whole history at every level"
        ),
    ] = "mlp"

    @model_validator(mode="after")
    def _check_width(self) -> SidDecoderOptions:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        return self


class SidDecoderSpec(ModelSpec):
    """A history decoder with a depth decoder over the levels of semantic ids."""

    options: ClassVar[type[StrictModel]] = SidDecoderOptions
    build: ClassVar[str] = "nonet.models.sid_decoder.decoder:build"
    features: ClassVar[tuple[str, ...]] = ("item", "user")

    def size(self, options: Options, around: ModelContext) -> ModelSize:
        """Count the parameters of the model."""
        width, layers = int(options.get("width", 64)), int(options.get("layers", 3))
        parameters = count_parameters(
            [around.codes] * around.levels,
            around.features,
            width,
            layers,
            heads=int(options.get("heads", 4)),
            block=str(options.get("block", "attention")),
            depth=str(options.get("depth", "mlp")),
            length=around.history + 1,
        )
        return ModelSize(
            parameters=parameters,
            layers=layers,
            width=width,
            feed_forward=4 * width,
            kv_width=width,
            vocabulary=around.levels * around.codes,
            levels=around.levels,
            positions_an_event=1,
            weight_bytes=4,
            depth_vectors=_DEPTH_VECTORS if options.get("depth") == "attention" else 0,
            matrices=layers * (5 if options.get("block") == "hstu" else 12) * width * width,
        )

    def make_build_options(self, options: Options, around: ModelContext) -> dict[str, Any]:
        """Return the builder's options; HSTU blocks also get the length of a history with its start position."""
        return {**options, "length": around.history + 1} if options.get("block") == "hstu" else dict(options)


def count_parameters(
    codes: Sequence[int],
    features: Mapping[str, int],
    width: int,
    layers: int,
    *,
    heads: int = 4,
    block: str = "attention",
    depth: str = "mlp",
    length: int = 1,
) -> int:
    """Count the parameters of nonet.models.sid_decoder.decoder.SidDecoder."""
    events = sum(codes) * width + sum(features.values()) * width + (GAPS + RATINGS + TYPES) * width
    blocks = layers * (_count_hstu_block(width, length) if block == "hstu" else _count_attention_block(width))
    own = _count_depth(codes, width) + (
        _count_depth_attention(codes, width, heads) if depth == "attention" else 0
    )
    return blocks + events + width + 2 * width + own


def _count_attention_block(width: int) -> int:
    block = 4 * width + (3 * width * width + 3 * width) + (width * width + width)
    return block + (4 * width * width + 4 * width) + (4 * width * width + width)


def _count_hstu_block(width: int, length: int) -> int:
    return (
        4 * width + (4 * width * width + 4 * width) + (width * width + width) + 2 * length - 1 + TIME_BUCKETS
    )


def _count_depth(codes: Sequence[int], width: int) -> int:
    """Count the parameters of the depth modules."""
    hidden = 2 * width
    depth = DEPTH_ROWS * DEPTH_RANK + (len(codes) - 1) * width * DEPTH_RANK
    for level, k in enumerate(codes):
        depth += (
            (width * hidden + hidden) + width * width + (hidden * width + width) + 2 * width + (width * k + k)
        )
        depth += sum(codes[:level]) * hidden
    return depth


def _count_depth_attention(codes: Sequence[int], width: int, heads: int) -> int:
    """Count the additional parameters for attention to the history: queries, keys, values and output projections."""
    each = width // heads
    unturned = heads * (each - each // 4 * 2)
    history = 2 * width * width + 2 * width
    levels = len(codes) * (2 * width * width + width)
    sought = sum(sum(codes[:level]) for level in range(len(codes))) * width
    return history + levels + sought + sum(codes[:-1]) * (unturned + width)


SPEC = SidDecoderSpec()
