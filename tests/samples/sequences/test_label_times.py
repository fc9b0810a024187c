"""The time from which on a target over labels that arrive later is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pyarrow as pa
import pytest

from nonet.samples.sequences import LABEL_END, LABEL_TIME, NEVER, compute_label_times, match_target, name_task

NAMES = ("a", "b", "c", "d")


def draw_condition(draw, names, constants, depth=3):
    """Return a random condition over labels, and over the column `price`, which is no label."""
    if depth == 0 or draw.random() < 0.2:
        left = draw.choice([*names, "price"])
        operator = draw.choice(["==", "!=", "<", "<=", ">", ">="])
        if draw.random() < 0.25:
            return f"{left} {operator} {draw.choice(names)}"
        if draw.random() < 0.2:
            return f"{left} in ({draw.choice(constants)}, {draw.choice(constants)})"
        return f"{left} {operator} {draw.choice(constants)}"
    parts = [draw_condition(draw, names, constants, depth - 1) for _ in range(2)]
    joined = f"({parts[0]}) {draw.choice(['and', 'or'])} ({parts[1]})"
    return f"not ({joined})" if draw.random() < 0.3 else joined


def draw_events(draw, names, values, n_events=40):
    """Return events whose labels are known after random delays, many of them equal, or never."""
    time = draw.integers(0, 50, n_events)
    columns = {"timestamp": time, "price": draw.choice(values, n_events).astype(np.float64)}
    for name in names:
        known_from = time + draw.integers(0, 6, n_events) * 10
        known_from[draw.random(n_events) < 0.25] = NEVER
        label = draw.choice(values, n_events)
        columns[name] = np.where(known_from < NEVER, label, np.nan).astype(np.float32)
        columns[LABEL_TIME + name] = columns[LABEL_END + name] = known_from
    return pa.table(columns)


def decide_by_hand(condition, event, names, values):
    """Try all assignments of the labels that are not known, at every time at which a label becomes known.

    Returns:
        The first time at which all outcomes are equal, and the outcome; (NEVER, False) if there is none.
    """
    times = {name: event[LABEL_TIME + name] for name in names}
    code = compile(condition, "condition", "eval")
    for now in sorted({event["timestamp"], *times.values()} - {NEVER}):
        choices = [[event[name]] if times[name] <= now else values for name in names]
        outcomes = {
            bool(eval(code, {"price": event["price"], **dict(zip(names, assigned, strict=True))}))
            for assigned in itertools.product(*choices)
        }
        if len(outcomes) == 1:
            return now, outcomes.pop()
    return NEVER, False


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.0, 1.0, 3.0], [-2.0, 0.0, 0.5, 1.0]])
@pytest.mark.parametrize("n_labels", [1, 2, 3, 4])
def test_a_target_is_known_when_no_assignment_of_the_labels_to_come_changes_it(n_labels, values):
    draw = np.random.default_rng([n_labels, len(values)])
    names, constants = list(NAMES[:n_labels]), [-1.0, 0.0, 0.5, 1.0, 2.0, 3.0]
    for _ in range(20):
        events = draw_events(draw, names, values)
        condition = draw_condition(draw, names, constants)
        known_from = compute_label_times(events, {"train": condition}).get(LABEL_TIME + "train")
        matches = match_target(condition, events, name="target")
        if known_from is None:
            assert not any(name in condition.split() for name in names)
            continue
        domain = sorted({0.0, 1.0}.union(*(events[name].to_pylist() for name in names)))
        domain = [value for value in domain if not math.isnan(value)]
        for row, event in enumerate(events.to_pylist()):
            read = [name for name in names if name in condition]
            time, outcome = decide_by_hand(condition, event, read, domain)
            assert known_from[row] == time, condition
            if time < NEVER:
                assert matches[row] == outcome, condition


def make_events(rows):
    """Return events at time 0 with the labels `carted` and `bought`, each (value, known from)."""
    columns = {"timestamp": [0] * len(rows)}
    for index, name in enumerate(("carted", "bought")):
        columns[name] = np.array([row[index][0] for row in rows], np.float32)
        columns[LABEL_TIME + name] = columns[LABEL_END + name] = [row[index][1] for row in rows]
    return pa.table(columns)


def find_times(condition, rows):
    """Return the times from which on a condition over `carted` and `bought` is known."""
    return compute_label_times(make_events(rows), {"t": condition})[LABEL_TIME + "t"].tolist()


def test_an_abandoned_cart_is_not_known_before_the_purchase_can_no_longer_come():
    rows = [((1, 1), (1, 6)), ((1, 1), (0, 7)), ((0, 1), (0, 7)), ((1, 1), (np.nan, NEVER))]
    assert find_times("carted == 1 and bought == 0", rows) == [6, 7, 1, NEVER]
    assert find_times("carted != bought", rows) == [6, 7, 7, NEVER]
    assert find_times("carted == 1 or bought == 0", rows) == [1, 1, 7, 1]


def test_labels_that_do_not_matter_are_not_waited_for():
    rows = [((1, 1), (np.nan, NEVER)), ((np.nan, NEVER), (np.nan, NEVER))]
    condition = "(carted == 1 and bought == 1) or (carted == 1 and bought == 0)"
    assert find_times(condition, rows) == [1, NEVER]
    assert match_target(condition, make_events(rows), name="target")[0]
    assert find_times("carted >= 0 and bought < 2", rows) == [0, 0]


def test_a_task_is_known_once_its_labels_and_columns_decide_it():
    rows = [((0, 5), (1, 2)), ((1, 5), (1, 2)), ((1, 5), (0, 2)), ((np.nan, NEVER), (0, 2))]
    events = make_events(rows).append_column("stars", pa.array([None, None, 5.0, 5.0]))
    task = name_task("train", "loved")
    times = compute_label_times(events, {task: "carted == 1 and bought == 1 and stars > 3"})[
        LABEL_TIME + task
    ]
    assert times.tolist() == [5, NEVER, 2, 2]
