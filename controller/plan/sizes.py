"""How large a model and its tables are, from the scenario alone: parameters, layers, bytes a token.

Exact for the SID decoder (a test counts the real module's parameters); for a Hugging Face backbone from its published shape
where its name is known, else estimated from the number of parameters in its name and said to be so. Pure: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nonet.controller.scenario import Scenario, table_arguments
from nonet.embedding.tables import TableSpec

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# layers, width, feed-forward width, key/value width, vocabulary: from the published config.json of each
_KNOWN = {
    "qwen3-0.6b": (0.596e9, 28, 1024, 3072, 1024, 151936),
    "qwen3-1.7b": (1.72e9, 28, 2048, 6144, 1024, 151936),
    "qwen3-4b": (4.02e9, 36, 2560, 9728, 1024, 151936),
    "qwen3-8b": (8.19e9, 36, 4096, 12288, 1024, 151936),
    "qwen2.5-0.5b": (0.494e9, 24, 896, 4864, 128, 151936),
    "qwen2.5-1.5b": (1.54e9, 28, 1536, 8960, 256, 151936),
    "llama-3.2-1b": (1.24e9, 16, 2048, 8192, 512, 128256),
}
_DEPTH_RANK, _DEPTH_ROWS = 16, 1 << 14  # nonet.models.sid.depth
_DEPTH_VECTORS = (
    16  # a level and position, at ahead: 3 (quickstart: 219 vectors a position are kept, with depth: mlp 154)
)
_GAPS, _RATINGS, _TYPES = 28, 21, 32  # nonet.models.sid.decoder
_BUCKETS = 64  # nonet.models.sid.hstu


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's shape. `levels` and `codes` are those of the semantic ids; `assumed` says what was guessed, "" if nothing."""

    parameters: int
    layers: int
    width: int
    feed_forward: int
    kv_width: int
    vocabulary: int
    levels: int
    positions_an_event: int
    weight_bytes: int
    assumed: str = ""
    depth_vectors: int = 0

    def activation_bytes(self, tokens: float) -> float:
        """Kept for the backward pass of this many positions; attention without its score matrix.

        A layer keeps about 10 vectors of the width, 2 of the feed-forward and 2 of keys and values; the head keeps its
        logits twice in fp32 (softmax and gradient). `depth_vectors` are those that a level of the depth decoder adds.
        """
        layer = 10 * self.width + 2 * self.feed_forward + 2 * self.kv_width
        kept = self.layers * layer + self.levels * self.depth_vectors * self.width
        return tokens * (kept * self.weight_bytes + 8 * self.vocabulary)

    def kv_bytes(self, tokens: float) -> float:
        """Keys and values of this many cached tokens."""
        return tokens * self.layers * 2 * self.kv_width * self.weight_bytes


def model_size(scenario: Scenario) -> ModelSize:
    """The shape of the scenario's model."""
    options = scenario.model.options()
    tokens = scenario.tokenizer.options()
    levels, codes = int(tokens.get("levels", 3)), int(tokens.get("codes", 64))
    if scenario.model.use == "hf":
        return _backbone(str(options.get("path", "")), options.get("precision", "fp32"), levels)
    width, layers = int(options.get("width", 64)), int(options.get("layers", 3))
    dims = feature_dims(scenario)
    return ModelSize(
        sid_decoder_parameters(
            [codes] * levels,
            dims,
            width,
            layers,
            heads=int(options.get("heads", 4)),
            block=str(options.get("block", "attention")),
            depth=str(options.get("depth", "mlp")),
            length=scenario.data.history + 1,
        ),
        layers,
        width,
        4 * width,
        width,
        levels * codes,
        levels,
        1,
        4,
        ""
        if scenario.model.use == "sid_decoder"
        else f"sizes of {scenario.model.use} as those of the SID decoder",
        _DEPTH_VECTORS if options.get("depth") == "attention" else 0,
    )


def feature_dims(scenario: Scenario) -> dict[str, int]:
    """Width of each sparse feature."""
    defaults = scenario.sparse.defaults
    return {
        feature: table.dim or defaults.dim
        for name, table in scenario.sparse.tables.items()
        for feature in table.features or [name]
    }


def sid_decoder_parameters(
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
    """Parameters of nonet.models.sid.decoder.SidDecoder."""
    events = sum(codes) * width + sum(features.values()) * width + (_GAPS + _RATINGS + _TYPES) * width
    blocks = layers * (_hstu_block(width, length) if block == "hstu" else _attention_block(width))
    own = _depth(codes, width) + (_depth_attention(codes, width, heads) if depth == "attention" else 0)
    return blocks + events + width + 2 * width + own


def _attention_block(width: int) -> int:
    block = 4 * width + (3 * width * width + 3 * width) + (width * width + width)
    return block + (4 * width * width + 4 * width) + (4 * width * width + width)


def _hstu_block(width: int, length: int) -> int:
    return 4 * width + (4 * width * width + 4 * width) + (width * width + width) + 2 * length - 1 + _BUCKETS


def _depth(codes: Sequence[int], width: int) -> int:
    hidden = 2 * width
    depth = _DEPTH_ROWS * _DEPTH_RANK + (len(codes) - 1) * width * _DEPTH_RANK
    for level, k in enumerate(codes):
        depth += (
            (width * hidden + hidden) + width * width + (hidden * width + width) + 2 * width + (width * k + k)
        )
        depth += sum(codes[:level]) * hidden
    return depth


def _depth_attention(codes: Sequence[int], width: int, heads: int) -> int:
    """What attending to the history adds: queries, keys, values and their way back."""
    each = width // heads
    unturned = heads * (each - each // 4 * 2)
    history = 2 * width * width + 2 * width
    levels = len(codes) * (2 * width * width + width)
    sought = sum(sum(codes[:level]) for level in range(len(codes))) * width
    return history + levels + sought + sum(codes[:-1]) * (unturned + width)


def table_bytes(scenario: Scenario) -> dict[str, int | None]:
    """Bytes of each table over all shards: its budget, or None where only the data will tell."""
    return {name: table.budget for name, table in scenario.sparse.tables.items()}


def hot_row_bytes(scenario: Scenario) -> int:
    """Bytes of hot rows on each shard's device, as the tables' tiers say."""
    return sum(_of_tier(scenario, name, "device") for name in scenario.sparse.tables)


def shard_bytes(scenario: Scenario, shards: int) -> float:
    """Bytes of rows in each shard's memory: what a tier holds there, else the shard's part of the budget, where one is given."""
    budgets = table_bytes(scenario)
    parts = [(_of_tier(scenario, name, "host"), (budget or 0) / shards) for name, budget in budgets.items()]
    return sum(min(tier, part) if tier and part else tier or part for tier, part in parts)


def _of_tier(scenario: Scenario, name: str, tier: str) -> int:
    table, defaults = scenario.sparse.tables[name], scenario.sparse.defaults
    rows, given = (table.tiers and getattr(table.tiers, key) for key in (f"{tier}_rows", tier))
    return int(given or (rows or 0) * TableSpec(**table_arguments(defaults, table)).row_bytes)


def _backbone(path: str, precision: str, levels: int) -> ModelSize:
    name = path.rstrip("/").rsplit("/", 1)[-1]
    known = _KNOWN.get(name.lower())
    size = _BYTES.get(precision, 4)
    if known:
        parameters, layers, width, wide, kv, words = known
        return ModelSize(int(parameters), layers, width, wide, kv, words, levels, levels, size)
    said = re.search(r"(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", name.lower())
    parameters = float(said.group(1)) * (1e9 if said.group(2) == "b" else 1e6) if said else 1e9
    width = max(256, round((parameters / 12 / 24) ** 0.5 / 128) * 128)
    told = "its name" if said else "nothing: 1 B parameters assumed"
    shape: dict[str, Any] = {"layers": 24, "width": width, "feed_forward": 4 * width, "kv_width": width}
    return ModelSize(
        int(parameters),
        **shape,
        vocabulary=128000,
        levels=levels,
        positions_an_event=levels,
        weight_bytes=size,
        assumed=f"the shape of {name or path} is estimated from {told}",
    )
