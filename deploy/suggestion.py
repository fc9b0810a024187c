"""What to try after a run: a `nonet recommend` that works on this run's own data, safe to paste into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow.parquet as pq

from nonet.controller.run_folder import RunFolder, runs_root

_LONGEST = 60  # letters of a title that is pleasant to type


def suggestion(run: RunFolder) -> str:
    """The command, with two popular titles, or with a user where items have none; "" where there is nothing to recommend."""
    artifacts = (run.read_json("results/tokenise.json") or {}).get("artifacts", {})
    if not {"sequences", "sids"} <= set(artifacts):
        return ""
    name = run.id if run.path.parent == runs_root() else str(run.path)
    titles = _popular_titles(Path(artifacts["sequences"]["path"]))
    if titles:
        return shlex.join(["nonet", "recommend", name, "--like", *titles])
    users = (run.read_json("report.json") or {}).get("users") or []
    return shlex.join(["nonet", "recommend", name, f"--user={users[0]['user_id']}"]) if users else ""


def _popular_titles(folder: Path) -> list[str]:
    """Two titles that are no ids and name one item each, of those that were interacted with most."""
    items = pq.read_table(folder / "items.parquet", columns=["item_id", "title", "events"]).sort_by(
        [("events", "descending")]
    )
    ids, titles = (list(map(str, items[name].to_pylist())) for name in ("item_id", "title"))
    times: dict[str, int] = {}
    for title in titles:
        times[title] = times.get(title, 0) + 1
    plain = [
        title
        for title, item in zip(titles, ids, strict=True)
        if title != item and times[title] == 1 and title.strip() and title.isprintable() and title[0] != "-"
    ]
    short = [title for title in plain if len(title) <= _LONGEST]
    return (short if len(short) > 1 else plain)[:2]
