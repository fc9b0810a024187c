"""Spec of the SID decoder: its options, and its size without building it (a test compares it with the built module)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from nonet.models import ModelContext, ModelSize, ModelSpec, Options
from nonet.options import Positive, Share, StrictModel

# Depth decoder: width and number of rows of the table `child` of hashed paths of codes.
DEPTH_RANK, DEPTH_ROWS = 16, 1 << 14
# History decoder: numbers of embeddings for time gaps between events, for ratings in half steps, and for event types.
GAPS, RATINGS, TYPES = 28, 21, 32
# HSTU: number of buckets of the time bias.
TIME_BUCKETS = 64
# Additional activation vectors per level and position with `depth: attention` and `ahead: 3` (in the quickstart, 219 vectors
# per position are stored for the backward pass, and 154 with `depth: mlp`).
_DEPTH_VECTORS = 16


class SidDecoderOptions(StrictModel):
    """Options of the decoder of semantic ids."""

    width: Positive = 64
    layers: Positive = 3
    heads: Positive = 4
    dropout: Share = 0.1
    block: Annotated[
        Literal["attention", "hstu"],
        Field(
            description="blocks of the history decoder: transformer blocks, or HSTU's gated pointwise attention with time bias"
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

    def find_tensor_limit(self, options: Options, ranks: int) -> str | None:
        """Return why the blocks cannot be divided among so many ranks; None if they can."""
        if options.get("block", "attention") != "attention":
            return f"model.block: {options['block']} (choose block: attention, or leave tensor out)"
        if (heads := int(options.get("heads", 4))) % ranks:
            return f"model.heads: {heads} (the heads must be a multiple of {ranks})"
        return None

    def size(self, options: Options, around: ModelContext) -> ModelSize:
        """Return the size of the model, from which the plan estimates memory."""
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
            # The linear layers of a block have 5 or 12 matrices [width, width].
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
    event_inputs = sum(codes) * width + sum(features.values()) * width + (GAPS + RATINGS + TYPES) * width
    blocks = layers * (_count_hstu_block(width, length) if block == "hstu" else _count_attention_block(width))
    depth_decoder = _count_depth(codes, width) + (
        _count_depth_attention(codes, width, heads) if depth == "attention" else 0
    )
    start_position, norm = width, 2 * width
    return blocks + event_inputs + start_position + norm + depth_decoder


def _count_attention_block(width: int) -> int:
    """Count the parameters of a block: two norms, the projections of attention, and the perceptron's two layers."""
    norms_and_attention = 4 * width + (3 * width * width + 3 * width) + (width * width + width)
    return norms_and_attention + (4 * width * width + 4 * width) + (4 * width * width + width)


def _count_hstu_block(width: int, length: int) -> int:
    """Count the parameters of a block: two norms, two linear layers, and the biases of position and time."""
    return (
        4 * width + (4 * width * width + 4 * width) + (width * width + width) + 2 * length - 1 + TIME_BUCKETS
    )


def _count_depth(codes: Sequence[int], width: int) -> int:
    """Count the parameters of the depth decoder: hashed paths, then the layers and the code embeddings of each level."""
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
    head_width = width // heads
    key_width = heads * (head_width - head_width // 4 * 2)
    history = 2 * width * width + 2 * width
    levels = len(codes) * (2 * width * width + width)
    query_codes = sum(sum(codes[:level]) for level in range(len(codes))) * width
    return history + levels + query_codes + sum(codes[:-1]) * (key_width + width)


SPEC = SidDecoderSpec()
