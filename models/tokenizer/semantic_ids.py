"""Semantic ids: every item becomes a tuple of codes, by the tokenizer that a scenario names.

Items with the same tuple are distinguished by a last *collision* level, so semantic ids are unique. A collapsed codebook is
rejected with an error, because no good model can be trained on it.
"""

# Shapes: I items, L levels, K codes of a level.

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.errors import DataError
from nonet.models.tokenizer.kinds import TOKENIZERS, TokenisedItems, TokenizeRequest
from nonet.models.tokenizer.known_sids import KnownSids
from nonet.plugins import load_heavy
from nonet.samples.sequences import Sequences

_MIN_DISTINCT = 0.1  # Minimum share of distinct tuples before the collision level.
_MIN_PERPLEXITY = 0.1  # Minimum perplexity of the first level, as a share of the codes that it can use.


def tokenise(
    items: pa.Table,
    seq: Sequences,
    config: Mapping[str, Any],
    *,
    seed: int,
    folder: Path,
    known: KnownSids | None = None,
) -> TokenisedItems:
    """Compute the semantic id of every item of a table.

    Args:
        items: The items.
        seq: The prepared events.
        config: The tokenizer, `use` (rq_kmeans by default) and its options.
        seed: Seed of the run.
        folder: The folder that relative paths start from.
        known: Ids that items keep, of the run that weights start from.

    Raises:
        ConfigError: There is no such tokenizer, or codes do not fit the known ones.
        DataError: The codebook collapsed, or a plug-in returned no codes of the items.
    """
    options = dict(config)
    use = options.pop("use", "rq_kmeans")
    request = TokenizeRequest(items, seq, seed, folder, known)
    codes_or_items = load_heavy(TOKENIZERS.get(use).encode)(request, options)
    if isinstance(codes_or_items, TokenisedItems):
        return codes_or_items
    return _finish_codes(request, codes_or_items, f"tokenizer {use!r}")


def check_tokenizer(items: pa.Table, config: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError or DataError if a source that `tokenise` reads does not exist or is not valid."""
    options = dict(config)
    load_heavy(TOKENIZERS.get(options.pop("use", "rq_kmeans")).check)(items, options, folder)


def _finish_codes(request: TokenizeRequest, codes_IL: Any, title: str) -> TokenisedItems:
    """Check the codes that a plug-in returned, and add the collision level."""
    codes_IL = np.asarray(codes_IL)
    if codes_IL.ndim != 2 or len(codes_IL) != len(request.items) or codes_IL.dtype.kind not in "iu":
        raise DataError(
            f"{title} returned {codes_IL.dtype} {list(codes_IL.shape)}; it must return integers "
            f"[{len(request.items)}, levels], the codes of each item"
        )
    if not codes_IL.size or codes_IL.min() < 0:
        raise DataError(f"{title} returned no codes, or a code below 0; codes count from 0")
    sizes = tuple(int(size) + 1 for size in codes_IL.max(0))
    return check_known(request, add_collision_level(codes_IL.astype(np.int32), sizes, always=True))


def check_known(request: TokenizeRequest, tokens: TokenisedItems) -> TokenisedItems:
    """Check ids that were computed independently of the known ones, and add the known items to the report.

    Raises:
        ConfigError: A known item has another id, or a code is beyond the known ones.
    """
    if request.known is None:
        return tokens
    keys = request.seq.get_item_keys(np.arange(len(request.items)))
    codes = request.known.check(tokens.sids, tokens.codes, keys)
    return make_extended_tokens(tokens.sids, codes, request.known, request.seq)


def make_extended_tokens(
    sids_IL: np.ndarray, codes: tuple[int, ...], known: KnownSids, seq: Sequences
) -> TokenisedItems:
    """Return the ids of all items with a report that also counts known and new items."""
    place_I = known.locate_items(seq.get_item_keys(np.arange(len(sids_IL))))
    report = describe_codebooks(sids_IL, codes)
    report |= {"known_items": int((place_I >= 0).sum()), "new_items": int((place_I < 0).sum())}
    return TokenisedItems(sids_IL, codes, report)


def number_collisions(codes_IL: np.ndarray) -> np.ndarray:
    """Return the collision number [I] of each item among those with the same tuple: 0, 1, ... in the order of the items."""
    _, tuple_index = np.unique(codes_IL, axis=0, return_inverse=True)
    order = np.argsort(tuple_index.reshape(-1), kind="stable")
    sorted_tuples = tuple_index.reshape(-1)[order]
    first_of_tuple = np.searchsorted(sorted_tuples, sorted_tuples, side="left")
    number = np.empty(len(order), np.int32)
    number[order] = np.arange(len(order)) - first_of_tuple
    return number


def describe_codebooks(codes_IL: np.ndarray, codes: tuple[int, ...]) -> dict[str, Any]:
    """Return statistics of the codes: codes used and perplexity by level, share of distinct ids, and the largest collision."""
    counts = [np.bincount(codes_IL[:, level], minlength=k) for level, k in enumerate(codes)]
    shares = [count[count > 0] / count.sum() for count in counts]
    _, group_sizes = np.unique(codes_IL, axis=0, return_counts=True)
    return {
        "levels": len(codes),
        "codes": list(codes),
        "used": [int((count > 0).sum()) for count in counts],
        "perplexity": [round(float(np.exp(-(share * np.log(share)).sum())), 2) for share in shares],
        "unique_before_collisions": len(group_sizes) / max(len(codes_IL), 1),
        "largest_collision": int(group_sizes.max(initial=0)),
    }


def add_collision_level(codes_IL: np.ndarray, codes: tuple[int, ...], *, always: bool) -> TokenisedItems:
    """Check that the codebook did not collapse, and add the collision level.

    Args:
        codes_IL: Codes of the items.
        codes: Number of codes of every level.
        always: Whether a collision level is added even if the codes are unique.

    Raises:
        DataError: The codebook collapsed.
    """
    report = describe_codebooks(codes_IL, codes)
    _require_no_collapse(report, len(codes_IL))
    if report["largest_collision"] > 1 or always:
        number = number_collisions(codes_IL)
        codes_IL = np.concatenate([codes_IL, number[:, None]], 1)
        codes = (*codes, report["largest_collision"])
        report = describe_codebooks(codes_IL, codes) | {
            name: report[name] for name in ("unique_before_collisions", "largest_collision")
        }
    return TokenisedItems(np.ascontiguousarray(codes_IL, dtype=np.int32), codes, report)


def _require_no_collapse(report: Mapping[str, Any], n_items: int) -> None:
    """Raise DataError if the first level uses too few codes, or too few items have distinct codes."""
    usable_codes = min(report["codes"][0], n_items)
    min_perplexity = max(_MIN_PERPLEXITY * usable_codes, 1.1) if usable_codes > 1 else 0.0
    if report["perplexity"][0] < min_perplexity:
        raise DataError(
            f"the codebook collapsed: the first level uses {report['used'][0]} codes with perplexity "
            f"{report['perplexity'][0]}, of {usable_codes} it could use; it must be at least {min_perplexity:.1f}. "
            "The item vectors are too similar: choose other tokenizer.vectors, or fewer codes."
        )
    if report["unique_before_collisions"] < _MIN_DISTINCT:
        raise DataError(
            f"the codebook collapsed: {n_items} items share {round(report['unique_before_collisions'] * n_items)} semantic "
            f"ids, the largest group holds {report['largest_collision']}; at least {_MIN_DISTINCT:.0%} must be distinct "
            "before the collision level. Raise tokenizer.levels or codes, or choose richer tokenizer.vectors."
        )
