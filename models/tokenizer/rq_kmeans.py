"""Residual k-means: clusters the vectors of items, then the residuals of each level, so the first code is the coarsest.

TIGER, Rajput et al. 2023. The same vectors and seed give the same codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.models.tokenizer.kinds import TokenisedItems, TokenizeRequest
from nonet.models.tokenizer.semantic_ids import add_collision_level, make_extended_tokens
from nonet.models.tokenizer.vectors import check_sources, compute_item_vectors
from nonet.random import rng

# Shapes: I items, D vector width, L levels, K codes of a level.
_ITERATIONS = 30
_VECTORS = ("title", "categories", "cooccurrence")
_SAMPLE = 256  # Training vectors per code (the limit of FAISS): more take time without better centres.
_ROWS = 1 << 16  # Vectors per chunk of residuals.
_CHUNK = 1 << 24  # Distances per chunk.


def encode_items(request: TokenizeRequest, options: Mapping[str, Any]) -> TokenisedItems:
    """Code the vectors of items; new items beside known ones are coded by the known ones' codebooks."""
    items, seq, known = request.items, request.seq, request.known
    spec = options.get("vectors", _VECTORS)
    vectors = compute_item_vectors(
        items, seq, spec, dim=options.get("dim", 64), seed=request.seed, folder=request.folder
    )
    levels, codes = options.get("levels", 3), options.get("codes", 64)
    if known is not None:
        return make_extended_tokens(
            known.extend(vectors, seq.get_item_keys(np.arange(len(items)))), known.codes, known, seq
        )
    return add_collision_level(
        quantise_residuals(vectors, levels, codes, request.seed), (codes,) * levels, always=True
    )


def check_vectors(items: pa.Table, options: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError or DataError if a source of vectors is not there."""
    check_sources(options.get("vectors", _VECTORS), items, folder)


def quantise_residuals(vectors: np.ndarray, levels: int, codes: int, seed: int) -> np.ndarray:
    """Compute residual k-means codes [I, levels] int32 of vectors [I, D]."""
    residual = vectors.astype(np.float32, copy=True)
    out = np.empty((len(vectors), levels), np.int32)
    for level in range(levels):
        centres = _fit_kmeans(residual, codes, seed, level)
        out[:, level], _ = _find_nearest(residual, centres)
        for start in range(0, len(residual), _ROWS):
            part = slice(start, start + _ROWS)
            residual[part] -= centres[out[part, level]]
    return out


def _fit_kmeans(x: np.ndarray, codes: int, seed: int, level: int) -> np.ndarray:
    """Fit centres [codes, D]; a code without vectors is moved to the vector with the largest distance."""
    dice = rng(seed, "tokenise", "kmeans", level)
    if len(x) > _SAMPLE * codes:
        x = x[np.sort(dice.choice(len(x), _SAMPLE * codes, replace=False))]
    centres = _spread(x, codes, dice)
    before = None
    for _ in range(_ITERATIONS):
        code, distance = _find_nearest(x, centres)
        if before is not None and np.array_equal(code, before):
            break
        before = code.copy()
        _revive(code, distance, codes)
        count = np.bincount(code, minlength=codes)
        sums = np.zeros(centres.shape, np.float64)
        order = np.argsort(
            code, kind="stable"
        )  # Sums per code in the order of the vectors: 20 times as fast as np.add.at.
        sums[count > 0] = np.add.reduceat(
            x[order], (np.cumsum(count) - count)[count > 0], axis=0, dtype=np.float64
        )
        centres = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], centres).astype(
            np.float32
        )
    return centres


def _spread(x: np.ndarray, codes: int, dice: np.random.Generator) -> np.ndarray:
    """Draw k-means++ seeds [codes, D]: each in proportion to its squared distance from those before it."""
    picks = [int(dice.integers(len(x)))]
    squared_distance = ((x - x[picks[0]]) ** 2).sum(1, dtype=np.float64)
    for _ in range(codes - 1):
        total = squared_distance.sum()
        pick = (
            int(dice.choice(len(x), p=squared_distance / total)) if total > 0 else int(dice.integers(len(x)))
        )
        picks.append(pick)
        squared_distance = np.minimum(squared_distance, ((x - x[pick]) ** 2).sum(1, dtype=np.float64))
    return x[picks].copy()


def _find_nearest(x: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest centre [I] and the squared distance to it [I]; ties go to the lower code."""
    code, distance = np.empty(len(x), np.int64), np.empty(len(x), np.float32)
    square_K = (centres**2).sum(1)
    step = max(1, _CHUNK // len(centres))
    for start in range(0, len(x), step):
        part = x[start : start + step]
        far = square_K - 2 * part @ centres.T
        code[start : start + step] = far.argmin(1)
        distance[start : start + step] = far.min(1) + (part**2).sum(1)
    return code, distance


def _revive(code: np.ndarray, distance: np.ndarray, codes: int) -> None:
    """Assign to each empty code the vector with the largest distance that is left, in place; vectors on their centre stay."""
    dead = np.flatnonzero(np.bincount(code, minlength=codes) == 0)
    worst = np.argsort(-distance, kind="stable")[: len(dead)]
    for empty, far in zip(dead, worst, strict=False):
        if distance[far] > 1e-9:
            code[far] = empty
