"""The cost of a filter that excludes half of a catalogue of a million items, for 16 merged requests."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from nonet.bench.serving.load import compute_median
from nonet.models import build_model
from nonet.models.generation import Trie, search_beams
from nonet.models.inference import FilterCache, ItemFilter
from nonet.models.sid_decoder import DecoderCache
from nonet.types import Jagged

_ITEMS, _CODES, _WIDTH, _MERGED, _BEAMS, _SEEN = 1_000_000, 256, 64, 16, 20, 50


def bench_filters(run: str, rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the seconds of the beams of 16 requests with 50 seen items each: by kind of filter, new and cached."""
    draw = np.random.default_rng(0)
    flat = draw.choice(_CODES**3, _ITEMS, replace=False)
    sids = np.stack([flat // _CODES**2, flat // _CODES % _CODES, flat % _CODES], 1)
    trie = Trie.build(sids, (_CODES,) * 3)
    model = build_model({"use": "sid_decoder", "width": _WIDTH}, (_CODES,) * 3, {}, 0).eval()

    def make_half_filter(name: str) -> ItemFilter:
        return ItemFilter(name, trie.version, draw.random(_ITEMS) < 0.5)

    kinds = {
        "none": [None] * _MERGED,
        "the same": [make_half_filter("same")] * _MERGED,
        "one each": [make_half_filter(str(number)) for number in range(_MERGED)],
    }
    seen = Jagged(draw.integers(0, _ITEMS, _MERGED * _SEEN), np.arange(_MERGED + 1) * _SEEN)
    rows, seconds, fresh = [], {}, {}
    for kind, chosen in kinds.items():
        kept, new = FilterCache(trie), []
        taken = []
        for _ in range(5 * rounds):
            new.append(_measure_seconds(model, trie, FilterCache(trie), chosen, seen))
            taken.append(_measure_seconds(model, trie, kept, chosen, seen))
        seconds[kind] = compute_median(taken[1:])
        fresh[kind] = compute_median(new)
        rows.append({"filters": kind, "s new": fresh[kind], "s kept": seconds[kind], "MB": kept.nbytes / 1e6})
    return rows, {
        "filters: seconds of 16 merged, one each": seconds["one each"],
        "filters: seconds of 16 merged, all new": fresh["one each"],
    }


@torch.no_grad()
def _measure_seconds(
    model: Any, trie: Trie, cache: FilterCache, chosen: list[ItemFilter | None], seen: Jagged
) -> float:
    """Time one beam search."""
    prompts = DecoderCache(torch.randn(len(chosen), _WIDTH))
    began = time.perf_counter()
    search_beams(model, prompts, trie, _BEAMS, forbidden=seen, within=cache.make_batch(chosen))
    return time.perf_counter() - began
