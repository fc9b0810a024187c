"""`nonet bench trie`: the speed of the trie compared with dictionaries, the validity of its beams, and its size."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from nonet.bench.timing import LapTimer

_LEVELS, _CODES, _USERS, _BEAMS = 3, 256, 64, 32  # _CODES per level, _BEAMS per user
_SECTIONS = ("children", "beams", "size")


def bench_trie(
    sections: str = "children,beams,size", items: int = 1_000_000, large: int = 10_000_000, rounds: int = 5
) -> dict[str, Any]:
    """Measure the sections.

    Args:
        sections: The sections, separated by commas. "children": looks up the valid children of 64 users x 32 beams at every
            level. "beams": counts invalid and duplicate ones among a million beams of a small catalogue. "size": builds and
            saves a trie, which a second process opens.
        items: Number of items of the section "children".
        large: Number of items of the section "size".
        rounds: Number of rounds of the section "children".

    Returns:
        A row per section; the values of `_RATIO_KEYS` are also returned as ratios.
    """
    functions = {
        "children": lambda: _measure_children(items, rounds),
        "beams": _count_illegal_beams,
        "size": lambda: _measure_size(large),
    }
    results = {name: functions[name]() for name in _SECTIONS if name in sections.split(",")}
    rows = [{"section": name, **row} for name, row in results.items()]
    ratio = {
        f"{name}: {key}": value
        for name, row in results.items()
        for key, value in row.items()
        if key in _RATIO_KEYS
    }
    return {"rows": rows, "ratio": ratio}


# Keys of the rows that the result has as ratios too.
_RATIO_KEYS = ("times as fast as dictionaries", "illegal", "doubled", "build_s", "MB", "open_s", "private_MB")


def _draw_sids(items: int, codes: int, levels: int, seed: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Draw random semantic ids [I, levels + 1], and return them with the number of codes per level.

    The last code distinguishes items whose other codes are equal.
    """
    codes_IL = np.random.default_rng(seed).integers(0, codes, (items, levels)).astype(np.int32)
    packed_codes = codes_IL.astype(np.int64) @ (codes ** np.arange(levels)[::-1])
    order = np.argsort(packed_codes, kind="stable")
    first = np.searchsorted(packed_codes[order], packed_codes[order], side="left")
    last_code = np.empty(items, np.int32)
    last_code[order] = np.arange(items) - first
    return np.concatenate([codes_IL, last_code[:, None]], 1), (*(codes,) * levels, int(last_code.max()) + 1)


def _measure_children(items: int, rounds: int) -> dict[str, Any]:
    """Time the lookup of the children of 2,048 prefixes at each of three levels, by the trie and by a dictionary of prefixes."""
    import torch

    from nonet.models.generation import Trie

    random_sids = np.random.default_rng(0).integers(0, _CODES, (items, _LEVELS)).astype(np.int32)
    sids, codes = np.unique(random_sids, axis=0), (_CODES,) * _LEVELS
    trie = Trie.build(sids, codes)
    next_codes: dict[tuple[int, ...], list[int]] = {}  # by prefix
    for level in range(_LEVELS):
        for prefix in np.unique(sids[:, : level + 1], axis=0).tolist():
            next_codes.setdefault(tuple(prefix[:-1]), []).append(prefix[-1])
    beam_items = np.random.default_rng(1).integers(0, len(sids), _USERS * _BEAMS)
    nodes = [trie.find_nodes(level, torch.from_numpy(beam_items)) for level in range(_LEVELS)]
    prefixes = [[tuple(row) for row in sids[beam_items, :level].tolist()] for level in range(_LEVELS)]
    trie_s, dictionary_s, same = [], [], True
    torch.set_num_threads(1)
    for _ in range(rounds):
        with LapTimer() as timer:
            trie_masks = [
                trie.find_children(level, nodes[level].view(_USERS, _BEAMS)) >= 0 for level in range(_LEVELS)
            ]
        trie_s.append(timer.last_s)
        with LapTimer() as timer:
            masks = []
            for level in range(_LEVELS):
                mask = torch.zeros(_USERS * _BEAMS, _CODES, dtype=torch.bool)
                for row, prefix in enumerate(prefixes[level]):
                    for code in next_codes[prefix]:
                        mask[row, code] = True
                masks.append(mask)
        dictionary_s.append(timer.last_s)
        same &= all(torch.equal(a.flatten(0, 1), b) for a, b in zip(trie_masks, masks, strict=True))
    list_s = []
    for _ in range(rounds):  # a faster loop, which sets all children of a prefix at once
        with LapTimer() as timer:
            for level in range(_LEVELS):
                mask = torch.zeros(_USERS * _BEAMS, _CODES, dtype=torch.bool)
                for row, prefix in enumerate(prefixes[level]):
                    mask[row, next_codes[prefix]] = True
        list_s.append(timer.last_s)
    median_s = float(np.median(trie_s))
    return {
        "items": len(sids),
        "ms": 1000 * median_s,
        "times as fast as dictionaries": float(np.median(dictionary_s)) / median_s,
        "times as fast as a list a prefix": float(np.median(list_s)) / median_s,
        "same": same,
    }


def _count_illegal_beams() -> dict[str, Any]:
    """Count invalid, masked and duplicate beams among a million beams, for random scores and 20,000 items."""
    import torch

    from nonet.models.generation import Trie, search_beams
    from nonet.types import Jagged

    sids, codes = _draw_sids(20_000, 32, 3, 2)
    trie, width, users = Trie.build(sids, codes), 100, 250
    illegal = doubled = total = 0
    for step in range(40):
        generator = np.random.default_rng(step)
        model = _RandomModel(codes, torch.Generator().manual_seed(step))
        forbidden = None
        if step % 2:  # every other step forbids 50 items per user
            items = [np.sort(generator.choice(20_000, 50, replace=False)) for _ in range(users)]
            forbidden = Jagged(np.concatenate(items), np.arange(users + 1) * 50)
        beams = search_beams(model, _Cache(torch.zeros(users, 1)), trie, width, forbidden=forbidden)  # type: ignore[arg-type]
        item, valid = beams.item.numpy(), beams.valid.numpy()
        has_own_sid = (sids[np.maximum(item, 0)] == beams.sid.numpy()).all(-1)
        illegal += int((valid & ~has_own_sid).sum())
        if forbidden is not None:
            is_forbidden = np.stack([np.isin(item[user], forbidden[user]) for user in range(users)])
            illegal += int((valid & is_forbidden).sum())
        ordered = np.sort(np.where(valid, item, -1 - np.arange(width)), 1)
        doubled += int((ordered[:, 1:] == ordered[:, :-1]).sum())
        total += int(valid.sum())
    return {"beams": total, "illegal": float(illegal), "doubled": float(doubled)}


class _Cache:
    """A KV cache that has only a state."""

    def __init__(self, state: Any):
        self.state = state


class _RandomModel:
    """A model with random logits at every step."""

    def __init__(self, codes: tuple[int, ...], generator: Any):
        self._codes, self._generator = codes, generator

    def step(self, cache: Any, prefix_UVl: Any, level: int) -> Any:
        """Return random logits of the codes of a level."""
        import torch

        return torch.randn(*prefix_UVl.shape[:2], self._codes[level], generator=self._generator)


def _measure_size(items: int) -> dict[str, Any]:
    """Measure the time to build a trie, its size on disk, and the time and memory of a second process that opens it."""
    from nonet.models.generation import Trie

    sids, codes = _draw_sids(items, _CODES, _LEVELS, 3)
    with LapTimer() as build_timer:
        trie = Trie.build(sids, codes)
    with tempfile.TemporaryDirectory() as folder:
        trie.save(folder)
        size_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            open_s, walk_s, private_bytes = pool.apply(_measure_open, (folder, items))
    return {
        "items": items,
        "codes": str(codes),
        "build_s": build_timer.last_s,
        "MB": size_bytes / 1e6,
        "open_s": open_s,
        "walk_s": walk_s,
        "private_MB": private_bytes / 1e6,
    }


def _measure_open(folder: str, items: int) -> tuple[float, float, int]:
    """Return the seconds to open a trie and to walk to 1,000 leaves, and by how many private bytes this process grew."""
    import torch

    from nonet.models.generation import Trie

    torch.zeros(1)  # initialises torch, which takes memory
    bytes_before = _read_private_bytes()
    with LapTimer() as open_timer:
        trie = Trie.load(folder)
    with LapTimer() as walk_timer:
        leaf = torch.arange(0, trie.n_leaves, max(1, trie.n_leaves // 1000))
        trie.decode_prefixes(trie.levels, leaf)
        for level in range(trie.levels):
            trie.find_children(level, trie.find_nodes(level, leaf[:1]))
    assert len(trie.leaf_of_item) == items
    return open_timer.last_s, walk_timer.last_s, _read_private_bytes() - bytes_before


def _read_private_bytes() -> int:
    """Return the private anonymous bytes of this process."""
    text = Path("/proc/self/smaps_rollup").read_text()
    rows = dict(line.split(":", 1) for line in text.splitlines()[1:] if ":" in line)
    return int(rows["Anonymous"].split()[0]) * 1024
