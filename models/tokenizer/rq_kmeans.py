"""Semantic ids: every item becomes a tuple of codes, by residual k-means or from the user's own file.

RQ-KMeans clusters the item vectors, then what each level left over, so the first code is the coarsest (TIGER, Rajput et
al. 2023). Items that end in the same tuple are told apart by a last *collision* level, so a semantic id is one item.
Same vectors and seed, same codes. A codebook that collapsed is refused: a model trained on it can only ever be bad.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.errors import ConfigError, DataError
from nonet.models.tokenizer.known_sids import KnownSids
from nonet.models.tokenizer.sid_file import read_sids
from nonet.models.tokenizer.vectors import check_sources, compute_item_vectors
from nonet.random import rng
from nonet.samples.sequences import Sequences

# Shapes: I items, D vector width, L levels, K codes of a level.
LEAST_UNIQUE = 0.1  # share of distinct tuples before the collision level
LEAST_EVEN = 0.1  # perplexity of the first level over the codes it could use
_ITERATIONS = 30
_VECTORS = ("title", "categories", "cooccurrence")
_SAMPLE = 256  # vectors a code that k-means learns from; more add time, not quality (FAISS' bound)
_ROWS = 1 << 16  # vectors that centres are taken from at once
_CHUNK = 1 << 24  # distances held at once


@dataclass(frozen=True, slots=True)
class TokenisedItems:
    """sids [I, L] int32, unique; codes: K of every level; report: how well the codebooks are used."""

    sids: np.ndarray
    codes: tuple[int, ...]
    report: dict[str, Any]


def tokenise(
    items: pa.Table,
    seq: Sequences,
    config: Mapping[str, Any],
    *,
    seed: int,
    folder: Path,
    known: KnownSids | None = None,
) -> TokenisedItems:
    """The semantic id of every item of the table. `use` rq_kmeans (vectors, levels, codes, dim) or file (path).

    `known`: ids that items keep, of the run that weights start from.
    """
    use = config.get("use", "rq_kmeans")
    if use == "file":
        from_file = _add_collision_level(
            *read_sids(folder / config["path"], items["item_id"].to_pylist()), always=False
        )
        if known is None:
            return from_file
        codes = known.check(from_file.sids, from_file.codes, seq.get_item_keys(np.arange(len(items))))
        return _make_extended_tokens(from_file.sids, codes, known, seq)
    if use != "rq_kmeans":
        raise ConfigError(f"tokenizer: use: {use!r} is unknown; there are: file, rq_kmeans.")
    spec = config.get("vectors", _VECTORS)
    vectors = compute_item_vectors(items, seq, spec, dim=config.get("dim", 64), seed=seed, folder=folder)
    levels, codes = config.get("levels", 3), config.get("codes", 64)
    if known is not None:
        return _make_extended_tokens(
            known.extend(vectors, seq.get_item_keys(np.arange(len(items)))), known.codes, known, seq
        )
    return _add_collision_level(
        quantise_residuals(vectors, levels, codes, seed), (codes,) * levels, always=True
    )


def _make_extended_tokens(
    sids_IL: np.ndarray, codes: tuple[int, ...], known: KnownSids, seq: Sequences
) -> TokenisedItems:
    place_I = known.locate_items(seq.get_item_keys(np.arange(len(sids_IL))))
    report = describe_codebooks(sids_IL, codes)
    report |= {"known_items": int((place_I >= 0).sum()), "new_items": int((place_I < 0).sum())}
    return TokenisedItems(sids_IL, codes, report)


def check_tokenizer(items: pa.Table, config: Mapping[str, Any], folder: Path) -> None:
    """Raises ConfigError or DataError where `tokenise` would not find what it is told to read."""
    if config.get("use") == "file":
        read_sids(folder / config["path"], items["item_id"].to_pylist())
    else:
        check_sources(config.get("vectors", _VECTORS), items, folder)


def quantise_residuals(vectors: np.ndarray, levels: int, codes: int, seed: int) -> np.ndarray:
    """Residual k-means codes [I, levels] int32 of vectors [I, D]."""
    residual = vectors.astype(np.float32, copy=True)
    out = np.empty((len(vectors), levels), np.int32)
    for level in range(levels):
        centres = _fit_kmeans(residual, codes, seed, level)
        out[:, level], _ = _find_nearest(residual, centres)
        for start in range(0, len(residual), _ROWS):
            part = slice(start, start + _ROWS)
            residual[part] -= centres[out[part, level]]
    return out


def resolve(codes_IL: np.ndarray) -> np.ndarray:
    """Collision number [I] of each item among those of its tuple, 0, 1, ... in the order of the items."""
    _, group = np.unique(codes_IL, axis=0, return_inverse=True)
    order = np.argsort(group.reshape(-1), kind="stable")
    ordered = group.reshape(-1)[order]
    first = np.searchsorted(ordered, ordered, side="left")
    number = np.empty(len(order), np.int32)
    number[order] = np.arange(len(order)) - first
    return number


def describe_codebooks(codes_IL: np.ndarray, codes: tuple[int, ...]) -> dict[str, Any]:
    """used and perplexity by level, the share of distinct tuples, and the largest group that shares one."""
    counts = [np.bincount(codes_IL[:, level], minlength=k) for level, k in enumerate(codes)]
    shares = [count[count > 0] / count.sum() for count in counts]
    _, group = np.unique(codes_IL, axis=0, return_counts=True)
    return {
        "levels": len(codes),
        "codes": list(codes),
        "used": [int((count > 0).sum()) for count in counts],
        "perplexity": [round(float(np.exp(-(share * np.log(share)).sum())), 2) for share in shares],
        "unique_before_collisions": len(group) / max(len(codes_IL), 1),
        "largest_collision": int(group.max(initial=0)),
    }


def _add_collision_level(codes_IL: np.ndarray, codes: tuple[int, ...], *, always: bool) -> TokenisedItems:
    """Check, and add the collision level (a user's own unique ids stay as they are)."""
    report = describe_codebooks(codes_IL, codes)
    _refuse_collapsed(report, len(codes_IL))
    if report["largest_collision"] > 1 or always:
        number = resolve(codes_IL)
        codes_IL = np.concatenate([codes_IL, number[:, None]], 1)
        codes = (*codes, report["largest_collision"])
        report = describe_codebooks(codes_IL, codes) | {
            name: report[name] for name in ("unique_before_collisions", "largest_collision")
        }
    return TokenisedItems(np.ascontiguousarray(codes_IL, dtype=np.int32), codes, report)


def _refuse_collapsed(report: Mapping[str, Any], items: int) -> None:
    reach = min(report["codes"][0], items)
    least = max(LEAST_EVEN * reach, 1.1) if reach > 1 else 0.0
    if report["perplexity"][0] < least:
        raise DataError(
            f"the codebook collapsed: the first level uses {report['used'][0]} codes with perplexity "
            f"{report['perplexity'][0]}, of {reach} it could use; at least {least:.1f} is wanted. "
            "The item vectors hardly differ: name other tokenizer.vectors, or fewer codes."
        )
    if report["unique_before_collisions"] < LEAST_UNIQUE:
        raise DataError(
            f"the codebook collapsed: {items} items share {round(report['unique_before_collisions'] * items)} semantic "
            f"ids, the largest group holds {report['largest_collision']}; at least {LEAST_UNIQUE:.0%} must be distinct "
            "before the collision level. Raise tokenizer.levels or codes, or name richer tokenizer.vectors."
        )


def _fit_kmeans(x: np.ndarray, codes: int, seed: int, level: int) -> np.ndarray:
    """Centres [codes, D]; a code that no vector chooses moves to the vector that is served worst."""
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
        )  # one sum a code, in the order of the vectors: 20 times as fast as np.add.at
        sums[count > 0] = np.add.reduceat(
            x[order], (np.cumsum(count) - count)[count > 0], axis=0, dtype=np.float64
        )
        centres = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], centres).astype(
            np.float32
        )
    return centres


def _spread(x: np.ndarray, codes: int, dice: np.random.Generator) -> np.ndarray:
    """k-means++ seeds [codes, D]: each drawn in proportion to its squared distance from those before it."""
    picks = [int(dice.integers(len(x)))]
    least = ((x - x[picks[0]]) ** 2).sum(1, dtype=np.float64)
    for _ in range(codes - 1):
        total = least.sum()
        pick = int(dice.choice(len(x), p=least / total)) if total > 0 else int(dice.integers(len(x)))
        picks.append(pick)
        least = np.minimum(least, ((x - x[pick]) ** 2).sum(1, dtype=np.float64))
    return x[picks].copy()


def _find_nearest(x: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nearest centre [I] and the squared distance to it [I]; ties go to the lower code."""
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
    """Give each dead code the worst-served vector that is left, in place; identical vectors are left alone."""
    dead = np.flatnonzero(np.bincount(code, minlength=codes) == 0)
    worst = np.argsort(-distance, kind="stable")[: len(dead)]
    for empty, far in zip(dead, worst, strict=False):
        if distance[far] > 1e-9:
            code[far] = empty
