"""`nonet recommend`: recommendations of every stage of a run, side by side with baselines that need no training.

With `--user`, the history consists of all events of a user of the data. With `--like`, it consists of the given titles, in
that order, for a new user. Seen items are recommended again only if the run's data allow it (`data.repeats`). The lists of
stages come from the serving engine, with the same events and beam width as on a server, so they equal a server's lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nonet.controller.record import Checkpoints, RunFolder, find_run
from nonet.controller.scenario import Scenario, check_supported, load_scenario
from nonet.controller.setup import make_baseline_options, make_run_setup
from nonet.errors import CheckpointError, ConfigError
from nonet.models.baselines import BASELINES, Popularity, make_baseline
from nonet.models.generation import Corpus, select_top_items
from nonet.models.inference import (
    EventHistory,
    InferenceEngine,
    Question,
    choose_beam_width,
    find_default_values,
)
from nonet.models.ranking import make_tie_order
from nonet.samples.batches import gather_masked_items, gather_seen_items
from nonet.samples.sequences import ALLOW, TEST, Sequences
from nonet.samples.tables import NONE, as_numbers, compute_keys
from nonet.suggest import find_close_matches
from nonet.types import Jagged
from nonet.workers.roles.evaluation import load_recommender

_SHOWN_HISTORY = 12  # number of newest titles of the history that are printed


def recommend_for(
    run: str,
    liked_titles: Sequence[str],
    user: str | None,
    top: int,
    make_question: Callable[[str, int], Question] | None = None,
) -> dict[str, Any]:
    """Recommend by every stage of a run, by popularity and by the transition counter.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        liked_titles: Titles that a new user liked.
        user: A user of the data, instead of `liked_titles`.
        top: Number of items of each list.
        make_question: Makes the question for a user and a number of items. It is needed if events were posted or items
            were withdrawn after training; by default the question is made from the run's data.

    Returns:
        {"run": id, "history": titles, "columns": {popularity, transition_counter, stage...: titles}}.

    Raises:
        ConfigError: The run, the user or a title does not exist.
    """
    if bool(liked_titles) == (user is not None):
        raise ConfigError(
            'give either --like TITLE [TITLE ...] or --user ID, e.g. --like "Alien" "Blade Runner"'
        )
    try:
        folder = find_run(run)
    except ConfigError as error:
        raise ConfigError(f"{error}. RUN must come first: nonet recommend last --like TITLE ...") from None
    scenario, _ = load_scenario(folder.scenario)
    check_supported(scenario, "recommend", folder.id)
    if folder.read_facts() is None:
        raise ConfigError(
            f"{folder.id} has not tokenised its data yet, so there is nothing to recommend from"
        )
    setup = make_run_setup(scenario)
    corpus = setup.open_corpus(folder.find_artifacts())
    if user is not None:
        row, length, histories = _find_known_user(corpus, user)
        events = _read_events(corpus, user, row)
    else:
        row, length, histories = _make_new_user(corpus, liked_titles)
        events = _make_events(corpus, histories)
    if user is not None and make_question is not None:
        question = make_question(user, top)
    else:
        is_known = row < len(corpus.seq)
        key = int(corpus.seq.get_user_keys(np.array([row]))[0]) if is_known else _get_unknown_user_key()
        question = _make_question(
            events, key, top, window=setup.history, width=scenario.evaluate.width, corpus=corpus
        )
    return _rank_items(
        folder, scenario, corpus, histories, row=row, length=length, top=top, question=question
    )


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
        lines.append(f"{rank + 1:>2}  " + "".join(f"{_truncate(cell, width - 2):<{width}}" for cell in cells))
    return "\n".join(lines)


def _rank_items(
    folder: RunFolder,
    scenario: Scenario,
    corpus: Corpus,
    histories: Corpus,
    row: int,
    length: int,
    top: int,
    question: Question,
) -> dict[str, Any]:
    """Rank items for one user by the baselines and stages; see `recommend_for`.

    Args:
        folder: The folder of the run.
        scenario: The scenario of the run.
        corpus: The data of the run.
        histories: A corpus with the history of the user, as `_find_known_user` returns it.
        row: The row of the user in `histories`.
        length: Number of events of the user.
        top: Number of items of each list.
        question: The question that the stages answer.
    """
    users, positions = np.array([row]), np.array([length])
    titles = [str(text) for text in corpus.items["title"].to_pylist()]
    history = gather_seen_items(histories.seq, users, positions)
    baselines = {
        name: make_baseline(config, len(titles), seed=scenario.seed, history=scenario.data.history)
        for name, config in make_baseline_options(scenario).items()
        if BASELINES.get(config["use"]).quick
    }
    scores = {
        name: baseline.fit(corpus.seq).scores(histories.seq, users, positions)
        for name, baseline in baselines.items()
    }
    tie_order = make_tie_order(Popularity(len(titles)).fit(corpus.seq).popularity, scenario.seed)
    # Items that a later version of the catalogue removed.
    removed_items = np.flatnonzero(np.asarray(corpus.trie.leaf_of_item) < 0)
    masked_items = gather_masked_items(histories.seq, users, positions).values
    hidden_items = np.unique(np.concatenate([masked_items, question.hidden, removed_items]))
    hidden = Jagged(hidden_items, np.array([0, len(hidden_items)]))
    lists = {
        name: select_top_items(torch.from_numpy(np.array(item_scores)), top, hidden, tie_order)[0].tolist()
        for name, item_scores in scores.items()
    }
    setup = make_run_setup(scenario)
    for stage in scenario.stages:
        try:
            checkpoint = Checkpoints(folder.checkpoints).find_stage_end(stage)
        except CheckpointError:  # the stage has not ended
            continue
        engine = InferenceEngine(load_recommender(setup, corpus, Path(checkpoint)))
        lists[stage] = engine.answer([question])[0].item.tolist()
    columns = {name: [titles[item] for item in items if item >= 0] for name, items in lists.items()}
    return {"run": folder.id, "history": [titles[item] for item in history.values], "columns": columns}


def _make_question(
    events: EventHistory, key: int, top: int, window: int, width: int, corpus: Corpus
) -> Question:
    """Make the question that a server would make from these events; seen items are hidden unless the data allow repeats.

    Args:
        events: All events of the user.
        key: The user's sparse key.
        top: Number of items to list.
        window: Number of newest events that the model reads.
        width: Minimum number of beams.
        corpus: The data of the run.
    """
    seen_items = np.unique(events.item.astype(np.int64))
    hidden = np.empty(0, np.int64) if corpus.seq.repeats == ALLOW else seen_items
    return Question(
        events.select_last(window), key, top=top, width=choose_beam_width(width, top), hidden=hidden
    )


def _read_events(corpus: Corpus, user: str, row: int) -> EventHistory:
    """Return all events of a user of the data, from the run's store if it has one."""
    seq = corpus.seq
    stored = corpus.read_stored_events(user)
    if stored is not None:
        order = np.argsort(stored["time"], kind="stable")
        columns = {name: values[order] for name, values in stored["columns"].items()}
        return EventHistory(stored["item"][order], stored["time"][order], stored["event"][order], columns)
    event_range = slice(int(seq.offsets[row]), int(seq.offsets[row + 1]))
    columns = seq.get_history_columns(event_range.start, event_range.stop)
    return EventHistory(seq.item[event_range], seq.time[event_range], seq.event[event_range], columns)


def _make_events(corpus: Corpus, histories: Corpus) -> EventHistory:
    """Return the events of a new user with default values of columns; `histories` is that of `_make_new_user`."""
    seq = histories.seq
    count = len(seq.item) - 1  # the last event is the artificial one that `_make_sequences` adds
    columns = {name: np.full(count, default) for name, default in find_default_values(corpus.seq).items()}
    return EventHistory(seq.item[:count], seq.time[:count], seq.event[:count], columns)


def _get_unknown_user_key() -> int:
    """Return the sparse key of an unknown user, whose row was never trained."""
    return int(compute_keys("user", as_numbers(np.array(["nobody"])))[0])


def _find_known_user(corpus: Corpus, user: str) -> tuple[int, int, Corpus]:
    """Find a user of the data.

    Returns:
        The user's row, the number of events, and a corpus in which this user has one more, artificial event. The baselines
        rank the items for that event.

    Raises:
        ConfigError: There is no such user.
    """
    ids = corpus.seq.user_id.astype(str)
    rows = np.flatnonzero(ids == user)
    stored = corpus.read_stored_events(user)
    if stored is not None:
        row = int(rows[0]) if len(rows) else len(corpus.seq)
        order = np.argsort(stored["time"], kind="stable")
        items, times = stored["item"][order], stored["time"][order]
        return row, len(items), corpus.replace_events(_make_sequences(corpus.seq, row, items, times))
    if not len(rows):
        close_ids = find_close_matches(user, ids, max_matches=3)
        raise ConfigError(
            f"there is no user {user!r} in this run"
            + (f"; close: {', '.join(close_ids)}" if close_ids else f"; for example {', '.join(ids[:3])}")
        )
    row = int(rows[0])
    items = corpus.seq.item[corpus.seq.offsets[row] : corpus.seq.offsets[row + 1]]
    times = corpus.seq.time[corpus.seq.offsets[row] : corpus.seq.offsets[row + 1]]
    return row, len(items), corpus.replace_events(_make_sequences(corpus.seq, row, items, times))


def _make_new_user(corpus: Corpus, liked_titles: Sequence[str]) -> tuple[int, int, Corpus]:
    """Make a new user who liked these titles in this order, and return the same values as `_find_known_user`."""
    items = np.array([_find_item(corpus, title) for title in liked_titles])
    row = len(corpus.seq)
    newest_time = int(np.asarray(corpus.seq.time).max())
    times = newest_time + np.arange(len(items))
    return row, len(items), corpus.replace_events(_make_sequences(corpus.seq, row, items, times))


def _make_sequences(seq: Sequences, row: int, items: np.ndarray, times: np.ndarray) -> Sequences:
    """Make sequences in which only `row` has events: `items`, and an artificial one whose item is never read."""
    count = len(items) + 1
    offsets = np.zeros(max(len(seq), row + 1) + 1, np.int64)
    offsets[row + 1 :] = count
    new_id = np.array([""], object) if seq.user_id.dtype == object else np.array([-1])
    ids = np.concatenate([seq.user_id, new_id])[: len(offsets) - 1]
    keys = seq.user_key
    if keys is not None:  # the key of an unknown user: a row that was never trained
        keys = np.append(keys, compute_keys("nobody", np.zeros(1, np.int64)))[: len(offsets) - 1]
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
        user_key=keys,
    )


def _fill_column(values: np.ndarray, count: int) -> np.ndarray:
    """Return a column [count] for made-up events: the column's maximum if it has numbers, else the id `NONE`."""
    if values.dtype.kind != "f":
        return np.full(count, NONE, values.dtype)
    return np.full(count, np.nanmax(values) if len(values) else 0, np.float32)


def _find_item(corpus: Corpus, title: str) -> int:
    """Return the item whose title equals or, if there is none, contains `title`; of several items the most popular.

    Raises:
        ConfigError: There is no such item.
    """
    titles = [str(text) for text in corpus.items["title"].to_pylist()]
    wanted_title = title.casefold().strip()
    events = corpus.items["events"].to_numpy()
    titles_without_year = [text.casefold().rsplit(" (", 1)[0] for text in titles]
    for matches in (lambda text: text == wanted_title, lambda text: wanted_title in text):
        items = [item for item, text in enumerate(titles_without_year) if matches(text)] or [
            item for item, text in enumerate(titles) if matches(text.casefold())
        ]
        if items:
            return max(items, key=lambda item: events[item])
    close_titles = find_close_matches(wanted_title, titles_without_year, max_matches=3, cutoff=0.5)
    close = ", ".join(titles[titles_without_year.index(text)] for text in close_titles)
    raise ConfigError(f"no item is called {title!r} in this run" + (f"; close: {close}" if close else ""))


def _truncate(text: str, width: int) -> str:
    """Shorten a text to a number of characters; "…" marks the end of a shortened text."""
    return text if len(text) <= width else text[: width - 1] + "…"
