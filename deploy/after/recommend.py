"""`nonet recommend`: recommendations of every stage of a run, side by side with baselines that need no training.

With `--user`, the history consists of all events of a user: those of the data, and those that were posted to servers. With
`--like` or `--items`, it consists of the given items, in that order, for a new user. Seen items are recommended again only if
the run's data allow it (`data.repeats`). The lists of stages come from the serving engine and are made from the same questions
as on a server, so they equal a server's lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nonet.controller.record import Checkpoints
from nonet.controller.setup import make_baseline_options
from nonet.deploy.opened import OpenedRun, PreparedQuestion, RequestFeatures
from nonet.errors import CheckpointError, ConfigError
from nonet.models.baselines.kinds import BASELINES, Popularity, make_baseline
from nonet.models.generation import Corpus, select_top_items
from nonet.models.inference import Answer, EventHistory, InferenceEngine
from nonet.models.ranking import make_tie_order
from nonet.samples.batches import gather_masked_items
from nonet.samples.sequences import TEST, Sequences
from nonet.samples.tables import NONE, compute_keys
from nonet.suggest import find_close_matches, truncate
from nonet.types import Jagged
from nonet.workers.roles.evaluation import load_recommender

_SHOWN_HISTORY = 12  # number of newest titles of the history that are printed


def recommend_for(
    run: str, liked_titles: Sequence[str], user: str | None, top: int, item_ids: Sequence[str] = ()
) -> dict[str, Any]:
    """Recommend by every stage of a run, by popularity and by the transition counter.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        liked_titles: Titles that a new user liked.
        user: A user of the data, instead of `liked_titles`.
        top: Number of items of each list.
        item_ids: Ids of items that a new user liked, instead of `liked_titles`.

    Returns:
        {"run": id, "history": titles, "columns": {popularity, transition_counter, stage...: titles}, "items": {the same
        names: [{"item": id, "title": title, "score": nats, or None for a baseline}]}}.

    Raises:
        ConfigError: The run, the user, a title or an id does not exist.
        StoreError: A store of the run does not answer.
    """
    if bool(liked_titles) + bool(item_ids) + (user is not None) != 1:
        raise ConfigError(
            'give either --like TITLE [TITLE ...], --items ID [ID ...] or --user ID, e.g. --like "Alien" "Blade Runner"'
        )
    try:
        opened = OpenedRun.open(run, verb="recommend")
    except ConfigError as error:
        if "there is no run" not in str(error):
            raise
        raise ConfigError(f"{error}. RUN must come first: nonet recommend last --like TITLE ...") from None
    features = RequestFeatures.from_run(opened, posts=False)
    if user is not None:
        _check_user(user, features, opened.corpus.seq.user_id)
    items = features.items
    liked_ids = items.get_ids(np.array([items.find_title(title) for title in liked_titles], np.int64))
    liked_ids = liked_ids or [*item_ids] or None
    prepared = features.make_list_question(user, liked_ids, top, withdrawn=opened.withdrawn)
    if prepared.unknown:
        raise ConfigError(
            f"no item of {opened.folder.id} has the id {prepared.unknown[0]!r}; give ids of its items table"
        )
    return _rank_items(opened, prepared, features.read_events(user, liked_ids)[0], top)


def format_columns(recommendations: dict[str, Any]) -> str:
    """Format the recommendations of `recommend_for` as a table of text, with a column for each list."""
    history = recommendations["history"]
    lines = [f"after {len(history)} events, the newest: " + "; ".join(history[-_SHOWN_HISTORY:]), ""]
    names = list(recommendations["columns"])
    width = max(14, min(34, 150 // max(1, len(names))))
    lines.append("    " + "".join(f"{name[: width - 2]:<{width}}" for name in names))
    lists = recommendations["columns"].values()
    for rank in range(max(map(len, lists), default=0)):
        cells = [titles[rank] if rank < len(titles) else "" for titles in lists]
        lines.append(f"{rank + 1:>2}  " + "".join(f"{truncate(cell, width - 2):<{width}}" for cell in cells))
    return "\n".join(lines)


def _rank_items(
    opened: OpenedRun, prepared: PreparedQuestion, events: EventHistory, top: int
) -> dict[str, Any]:
    """Rank items for one user by the baselines and stages; see `recommend_for`.

    Args:
        opened: The run.
        prepared: The question that the stages answer.
        events: All events of the user.
        top: Number of items of each list.
    """
    scenario, corpus, question = opened.scenario, opened.catalogues.get_newest(), prepared.question
    rows = np.flatnonzero(corpus.seq.user_id.astype(str) == question.user) if question.user else []
    row = int(rows[0]) if len(rows) else len(corpus.seq)
    # The baselines rank the items for one more, artificial event of the user.
    histories = _make_sequences(corpus.seq, row, events.item, events.time)
    users, positions = np.array([row]), np.array([len(events)])
    ids = corpus.item_id.tolist()
    titles = [text or str(id) for text, id in zip(corpus.items["title"].to_pylist(), ids, strict=True)]
    baselines = {
        name: make_baseline(config, len(titles), seed=scenario.seed, history=scenario.data.history)
        for name, config in make_baseline_options(scenario).items()
        if BASELINES.get(config["use"]).quick
    }
    scores = {
        name: baseline.fit(corpus.seq).scores(histories, users, positions)
        for name, baseline in baselines.items()
    }
    tie_order = make_tie_order(Popularity(len(titles)).fit(corpus.seq).popularity, scenario.seed)
    # Items that a later version of the catalogue removed.
    removed_items = np.flatnonzero(np.asarray(corpus.trie.leaf_of_item) < 0)
    masked_items = gather_masked_items(histories, users, positions).values
    hidden_items = np.unique(np.concatenate([masked_items, question.hidden, removed_items]))
    hidden = Jagged(hidden_items, np.array([0, len(hidden_items)]))
    lists: dict[str, list[tuple[int, float | None]]] = {}
    for name, item_scores in scores.items():
        best = select_top_items(torch.from_numpy(np.array(item_scores)), top, hidden, tie_order)[0].tolist()
        lists[name] = [(item, None) for item in best]
    for stage, answer in _answer_by_stages(opened, corpus, prepared):
        lists[stage] = list(zip(answer.item.tolist(), answer.score.tolist(), strict=True))
    shown = {
        name: [
            {"item": ids[item], "title": titles[item], "score": score} for item, score in ranked if item >= 0
        ]
        for name, ranked in lists.items()
    }
    return {
        "run": opened.folder.id,
        "history": [titles[item] for item in events.item],
        "columns": {name: [row["title"] for row in ranked] for name, ranked in shown.items()},
        "items": shown,
    }


def _answer_by_stages(
    opened: OpenedRun, corpus: Corpus, prepared: PreparedQuestion
) -> Iterator[tuple[str, Answer]]:
    """Yield the name and the answer of each stage that has ended."""
    for stage in opened.scenario.stages:
        try:
            checkpoint = Checkpoints(opened.folder.checkpoints).find_stage_end(stage)
        except CheckpointError:  # the stage has not ended
            continue
        engine = InferenceEngine(load_recommender(opened.setup, corpus, Path(checkpoint)))
        yield stage, engine.answer([prepared.question])[0]


def _check_user(user: str, features: RequestFeatures, user_ids: np.ndarray) -> None:
    """Raise ConfigError if no event of a user is known."""
    if user in features.histories:
        return
    ids = user_ids.astype(str)
    close_ids = find_close_matches(user, ids, max_matches=3)
    raise ConfigError(
        f"there is no user {user!r} in this run"
        + (f"; close: {', '.join(close_ids)}" if close_ids else f"; for example {', '.join(ids[:3])}")
    )


def _make_sequences(seq: Sequences, row: int, items: np.ndarray, times: np.ndarray) -> Sequences:
    """Make sequences in which only `row` has events: `items`, and an artificial one whose item is never read."""
    count = len(items) + 1
    offsets = np.zeros(max(len(seq), row + 1) + 1, np.int64)
    offsets[row + 1 :] = count
    new_id = np.array([""], object) if seq.user_id.dtype == object else np.array([-1])
    ids = np.concatenate([seq.user_id, new_id])[: len(offsets) - 1]
    unknown_key = compute_keys("nobody", np.zeros(1, np.int64))  # of a row that was never trained
    all_items = np.append(items, items[-1]).astype(np.int32)
    columns = {name: _fill_column(values, count) for name, values in seq.columns.items()}
    return replace(
        seq,
        user_id=ids,
        offsets=offsets,
        item=all_items,
        time=np.append(times, times[-1]).astype(np.int64),
        event=np.zeros(count, np.int32),
        split=np.full(count, TEST, np.int8),
        columns=columns,
        targets={},
        folded=None,
        user_key=np.append(seq.user_key, unknown_key)[: len(offsets) - 1],
    )


def _fill_column(values: np.ndarray, count: int) -> np.ndarray:
    """Return a column [count] for made-up events: the column's maximum if it has numbers, else the id `NONE`."""
    if values.dtype.kind != "f":
        return np.full(count, NONE, values.dtype)
    numbers = values[~np.isnan(values)]
    return np.full(count, numbers.max() if len(numbers) else 0, np.float32)
