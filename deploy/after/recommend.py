"""`nonet recommend`: recommendations of every stage of a run, side by side with baselines that need no training.

For a user of the data, the history is all of that user's events. With `--like`, it is the given titles, in
that order, of a new user. Seen items are only recommended again if the run's data allow it
(`data.repeats`). Stages answer with the serving engine, from the same events and with as many beams, so a
list equals that of a server of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nonet.controller.record import Checkpoints, RunFolder, find_run
from nonet.controller.scenario import Scenario, load_scenario
from nonet.controller.setup import baselines_of, run_setup
from nonet.errors import CheckpointError, ConfigError
from nonet.models.baselines import BASELINES, Popularity, make_baseline
from nonet.models.generation import Corpus, top_items
from nonet.models.inference import Engine, Events, Question, beam_width, usual_columns
from nonet.models.ranking import tie_order
from nonet.samples.batches import masked, seen
from nonet.samples.sequences import ALLOW, TEST, Sequences
from nonet.samples.tables import NONE, as_numbers, keys_in
from nonet.suggest import find_close_matches
from nonet.types import Jagged
from nonet.workers.roles.evaluation import load_recommender

_SHOWN_HISTORY = 12


def recommend_for(
    run: str,
    like: Sequence[str],
    user: str | None,
    top: int,
    ask: Callable[[str, int], Question] | None = None,
) -> dict[str, Any]:
    """Recommend by every stage of a run, by popularity and by the transition counter.

    Args:
        run: A run's folder, its id, a unique prefix, or `last`.
        like: Titles that a new user liked.
        user: A user of the data, instead of `like`.
        top: Number of items of each list.
        ask: Makes the question for a user and a number of items if events were posted or items withdrawn
            since. By default it is made from the data.

    Returns:
        {"run": id, "history": titles, "columns": {popularity, transition_counter, stage...: titles}}.

    Raises:
        ConfigError: The run, the user or a title does not exist.
    """
    if bool(like) == (user is not None):
        raise ConfigError(
            'give either --like TITLE [TITLE ...] or --user ID, e.g. --like "Alien" "Blade Runner"'
        )
    try:
        folder = find_run(run)
    except ConfigError as error:
        raise ConfigError(f"{error}. RUN must come first: nonet recommend last --like TITLE ...") from None
    facts = folder.read_facts()
    if facts is None:
        raise ConfigError(
            f"{folder.id} has not tokenised its data yet, so there is nothing to recommend from"
        )
    if "sids" not in facts["artifacts"]:
        raise ConfigError(f"{folder.id} predicts clicks: it scores events and has nothing to recommend from")
    scenario, _ = load_scenario(folder.scenario)
    corpus = run_setup(scenario).corpus(folder.artifacts())
    setup = run_setup(scenario)
    if user is not None:
        row, length, histories = _known_user(corpus, user)
        events = _events_of(corpus, user, row)
    else:
        row, length, histories = _new_user(corpus, like)
        events = _events_of_titles(corpus, histories)
    if user is not None and ask is not None:
        question = ask(user, top)
    else:
        key = int(corpus.seq.keys_of_users(np.array([row]))[0]) if row < len(corpus.seq) else _key_of_nobody()
        question = _question(events, key, top, setup.history, scenario.evaluate.width, corpus)
    return _answers(folder, scenario, corpus, histories, row, length, top, question)


def columns(answer: dict[str, Any]) -> str:
    """Format recommendations as a table of text."""
    history = answer["history"]
    lines = [f"after {len(history)} events, the newest: " + "; ".join(history[-_SHOWN_HISTORY:]), ""]
    names = list(answer["columns"])
    width = max(14, min(34, 150 // max(1, len(names))))
    lines.append("    " + "".join(f"{name[: width - 2]:<{width}}" for name in names))
    for place in range(max(map(len, answer["columns"].values()), default=0)):
        cells = [titles[place] if place < len(titles) else "" for titles in answer["columns"].values()]
        lines.append(f"{place + 1:>2}  " + "".join(f"{_cut(cell, width - 2):<{width}}" for cell in cells))
    return "\n".join(lines)


def _answers(
    folder: RunFolder,
    scenario: Scenario,
    corpus: Corpus,
    histories: Corpus,
    row: int,
    length: int,
    top: int,
    question: Question,
) -> dict[str, Any]:
    """Rank items by baselines and stages."""
    users, positions = np.array([row]), np.array([length])
    titles = [str(text) for text in corpus.items["title"].to_pylist()]
    history = seen(histories.seq, users, positions)
    quick = {
        name: make_baseline(config, len(titles), seed=scenario.seed, history=scenario.data.history)
        for name, config in baselines_of(scenario).items()
        if BASELINES.get(config["use"]).quick
    }
    scores = {
        name: baseline.fit(corpus.seq).scores(histories.seq, users, positions)
        for name, baseline in quick.items()
    }
    tie = tie_order(Popularity(len(titles)).fit(corpus.seq).popularity, scenario.seed)
    gone = np.flatnonzero(np.asarray(corpus.trie.leaf_of_item) < 0)
    out = np.unique(np.concatenate([masked(histories.seq, users, positions).values, question.hidden, gone]))
    hidden = Jagged(out, np.array([0, len(out)]))
    best = {
        name: top_items(torch.from_numpy(np.array(item_scores)), top, hidden, tie)[0].tolist()
        for name, item_scores in scores.items()
    }
    run = run_setup(scenario)
    for stage in scenario.stages:
        try:
            path = Checkpoints(folder.checkpoints).end_of(stage)
        except CheckpointError:
            continue
        engine = Engine(load_recommender(run, corpus, Path(path)))
        best[stage] = engine.answer([question])[0].item.tolist()
    columns = {name: [titles[i] for i in items if i >= 0] for name, items in best.items()}
    return {"run": folder.id, "history": [titles[i] for i in history.values], "columns": columns}


def _question(events: Events, key: int, top: int, window: int, width: int, corpus: Corpus) -> Question:
    """Make the question that a server would make from these events; seen items are hidden if the data say so."""
    seen_items = np.unique(events.item.astype(np.int64))
    hidden = np.empty(0, np.int64) if corpus.seq.repeats == ALLOW else seen_items
    return Question(events.last(window), key, top=top, width=beam_width(width, top), hidden=hidden)


def _events_of(corpus: Corpus, user: str, row: int) -> Events:
    """Return all events of a user of the data, from the run's store if it has one."""
    seq = corpus.seq
    found = corpus.events_in_store(user)
    if found is not None:
        order = np.argsort(found["time"], kind="stable")
        columns = {name: values[order] for name, values in found["columns"].items()}
        return Events(found["item"][order], found["time"][order], found["event"][order], columns)
    cut = slice(int(seq.offsets[row]), int(seq.offsets[row + 1]))
    columns = seq.history_columns(cut.start, cut.stop)
    return Events(seq.item[cut], seq.time[cut], seq.event[cut], columns)


def _events_of_titles(corpus: Corpus, histories: Corpus) -> Events:
    """Return the events of the titles that a new user liked, with default values of columns."""
    seq = histories.seq
    count = len(seq.item) - 1  # the last event stands for the question
    columns = {name: np.full(count, usual) for name, usual in usual_columns(corpus.seq).items()}
    return Events(seq.item[:count], seq.time[:count], seq.event[:count], columns)


def _key_of_nobody() -> int:
    """Return the sparse key of an unknown user, whose row was never trained."""
    return int(keys_in("user", as_numbers(np.array(["nobody"])))[0])


def _known_user(corpus: Corpus, user: str) -> tuple[int, int, Corpus]:
    """Find a user of the data.

    Returns the user's row, the number of events, and a corpus in which an extra event stands for the
    question.
    """
    ids = corpus.seq.user_id.astype(str)
    rows = np.flatnonzero(ids == user)
    found = corpus.events_in_store(user)
    if found is not None:
        row = int(rows[0]) if len(rows) else len(corpus.seq)
        order = np.argsort(found["time"], kind="stable")
        items, times = found["item"][order], found["time"][order]
        return row, len(items), corpus.with_events(_with_history(corpus.seq, row, items, times))
    if not len(rows):
        near = find_close_matches(user, ids, 3)
        raise ConfigError(
            f"there is no user {user!r} in this run"
            + (f"; close: {', '.join(near)}" if near else f"; for example {', '.join(ids[:3])}")
        )
    row = int(rows[0])
    items = corpus.seq.item[corpus.seq.offsets[row] : corpus.seq.offsets[row + 1]]
    times = corpus.seq.time[corpus.seq.offsets[row] : corpus.seq.offsets[row + 1]]
    return row, len(items), corpus.with_events(_with_history(corpus.seq, row, items, times))


def _new_user(corpus: Corpus, like: Sequence[str]) -> tuple[int, int, Corpus]:
    """Make a new user who liked these titles in this order; the result is that of `_known_user`."""
    items = np.array([_item_of(corpus, title) for title in like])
    row = len(corpus.seq)
    newest = int(np.asarray(corpus.seq.time).max())
    times = newest + np.arange(len(items))
    return row, len(items), corpus.with_events(_with_history(corpus.seq, row, items, times))


def _with_history(seq: Sequences, row: int, items: np.ndarray, times: np.ndarray) -> Sequences:
    """Make sequences in which only `row` has events: `items`, and one more that is asked for and never read."""
    count = len(items) + 1
    offsets = np.zeros(max(len(seq), row + 1) + 1, np.int64)
    offsets[row + 1 :] = count
    nobody = np.array([""], object) if seq.user_id.dtype == object else np.array([-1])
    ids = np.concatenate([seq.user_id, nobody])[: len(offsets) - 1]
    keys = seq.user_key
    if keys is not None:  # the key of an unknown user: a row that was never trained
        keys = np.append(keys, keys_in("nobody", np.zeros(1, np.int64)))[: len(offsets) - 1]
    whole = np.append(items, items[-1]).astype(np.int32)
    columns = {name: _like_the_newest(values, count) for name, values in seq.columns.items()}
    return replace(
        seq,
        user_id=ids,
        offsets=offsets,
        item=whole,
        time=np.append(times, times[-1]).astype(np.int64),
        event=np.zeros(count, np.int32),
        split=np.full(count, TEST, np.int8),
        columns=columns,
        targets={},
        folded=None,
        user_key=keys,
    )


def _like_the_newest(values: np.ndarray, count: int) -> np.ndarray:
    """Fill a column [count] of artificial events: with its maximum for numbers, else with no id."""
    if values.dtype.kind != "f":
        return np.full(count, NONE, values.dtype)
    return np.full(count, np.nanmax(values) if len(values) else 0, np.float32)


def _item_of(corpus: Corpus, title: str) -> int:
    """Find the item whose title equals, or else contains, the given words; the most popular of several."""
    titles = [str(text) for text in corpus.items["title"].to_pylist()]
    words = title.casefold().strip()
    events = corpus.items["events"].to_numpy()
    bare = [text.casefold().rsplit(" (", 1)[0] for text in titles]
    for fits in (lambda text: text == words, lambda text: words in text):
        items = [i for i, text in enumerate(bare) if fits(text)] or [
            i for i, text in enumerate(titles) if fits(text.casefold())
        ]
        if items:
            return max(items, key=lambda i: events[i])
    near = find_close_matches(words, bare, 3, 0.5)
    close = ", ".join(titles[bare.index(text)] for text in near)
    raise ConfigError(f"no item is called {title!r} in this run" + (f"; close: {close}" if close else ""))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
