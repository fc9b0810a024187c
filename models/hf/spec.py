"""Hugging Face backbones: the shape of a published model by its name, else estimated from the parameters its name says."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from nonet.models import ModelSize, ModelSpec, Options, Surroundings
from nonet.options import StrictModel

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


class HfModel(StrictModel):
    path: str
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    attention: Literal["uni", "sdpa", "eager"] = "sdpa"


class HfSpec(ModelSpec):
    """Planned, not run."""

    options: ClassVar[type[StrictModel]] = HfModel
    runs: ClassVar[bool] = False

    def size(self, options: Options, around: Surroundings) -> ModelSize:
        return _backbone(str(options.get("path", "")), options.get("precision", "fp32"), around.levels)


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
    source = "its name" if said else "nothing: 1 B parameters assumed"
    shape: dict[str, Any] = {"layers": 24, "width": width, "feed_forward": 4 * width, "kv_width": width}
    return ModelSize(
        int(parameters),
        **shape,
        vocabulary=128000,
        levels=levels,
        positions_an_event=levels,
        weight_bytes=size,
        assumed=f"the shape of {name or path} is estimated from {source}",
    )


SPEC = HfSpec()
