"""A seeded log of any size: most items of a session lie close to one random item, popularity by Zipf's law, and drift.

Files are written one at a time, so memory does not grow with the log. Each file is a span of time with random users,
as in an interaction log that is split by time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.random import rng

_FILE_EVENTS = 5_000_000
_SPAN_S = 90 * 86_400
_SESSION = 5  # events of a session on average
_ZIPF = 1.1
_NEAR = 0.6  # share of a session's events that lie near its centre item
_KINDS = ("view", "cart", "buy")
CATEGORIES = 200


def write_log(folder: Path, events: int, users: int, items: int, seed: int) -> dict[str, str]:
    """Write events-*.parquet and items.parquet, and return the section `data` of a scenario: path by key."""
    folder.mkdir(parents=True, exist_ok=True)
    files = -(-events // _FILE_EVENTS)
    for number in range(files):
        rows = min(_FILE_EVENTS, events - number * _FILE_EVENTS)
        table = _make_span(rows, number, files, users, items, seed)
        pq.write_table(
            table, folder / f"events-{number:05}.parquet", compression="zstd", row_group_size=1 << 20
        )
    _write_items(folder / "items.parquet", items, seed)
    return {"interactions": str(folder / "events-*.parquet"), "items": str(folder / "items.parquet")}


def _make_span(rows: int, number: int, files: int, users: int, items: int, seed: int) -> pa.Table:
    """Draw the events of one span of time."""
    dice = rng(seed, "scale", "events", number)
    sessions = rows // _SESSION + 1
    session = np.sort(dice.integers(0, sessions, rows))
    user = dice.integers(0, users, sessions)[session]
    centre = _draw_zipf(dice, sessions, items)[session]
    near = (centre + dice.geometric(0.2, rows)) % items
    fresh = int(items * 0.1) * number // files  # what is popular moves on with the spans
    item = np.where(dice.random(rows) < _NEAR, near, _draw_zipf(dice, rows, items))
    start = _SPAN_S * number // files + dice.integers(0, _SPAN_S // files, sessions)
    second = start[session] + np.arange(rows) % 600
    order = np.argsort(second, kind="stable")
    return pa.table(
        {
            "user_id": user[order].astype(np.int64),
            "item_id": ((item[order] + fresh) % items).astype(np.int64),
            "timestamp": (1_750_000_000 + second[order]).astype(np.int64),
            "event": pa.DictionaryArray.from_arrays(
                pa.array(np.minimum(dice.geometric(0.8, rows) - 1, 2).astype(np.int8)), pa.array(_KINDS)
            ),
        }
    )


def _draw_zipf(dice: np.random.Generator, n: int, items: int) -> np.ndarray:
    """Draw ranks from 0 with P(r) ~ (r + 10)^-1.1, by the inverse of its integral."""
    power = 1 - _ZIPF
    low, high = 10.0**power, (items + 10.0) ** power
    rank = (low + dice.random(n) * (high - low)) ** (1 / power) - 10
    return np.minimum(rank.astype(np.int64), items - 1)


def _write_items(path: Path, items: int, seed: int) -> None:
    """Write the items with titles and categories."""
    dice = rng(seed, "scale", "items")
    category = np.arange(items) * CATEGORIES // items
    words = dice.integers(0, 5000, (items, 2))
    title = pa.array([f"w{a} w{b} c{c}" for (a, b), c in zip(words.tolist(), category.tolist(), strict=True)])
    names = pa.array([[f"c{c}"] for c in category.tolist()])
    pq.write_table(pa.table({"item_id": np.arange(items), "title": title, "categories": names}), path)
