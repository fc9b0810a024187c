"""The rule that derives settings from the profile of a data set. Every number that it uses is a constant in this file.

data.keep       Items with fewer than 5 events are dropped if 80 % of the events remain; otherwise the threshold is 3, 2, or none.
                Users with one event are dropped, as they have no next event.
data.split      5 test events if the median user has 30 events, else 1; 1 validation event. If a stage rolls out, as many RL
                events as test events are held out too.
data.history    Covers 90 % of the users, between 10 and 50 events.
tokenizer       Vectors from cooccurrence, and from the title, the categories and other text that items share. 64 codes per level
                up to 5,000 items, 128 up to 30,000, 256 above; fewer if there are fewer than 4 items per code. 3 levels, more
                if the codes would give fewer than 16 ids per item.
model           Width 64, 128 from 2 M training events on; 3 layers if the median user has 30 events, else 2; dropout 0.1 if an
                item has 20 events, else 0.3. A memory of transitions, whose weight is fitted to validation; if the median user
                has fewer than 30 events, the items nearest to a user's state vote too.
sparse.tables   An `item` row of 64 numbers, of 32 if the median user has 30 events; a `user` row if the median user has 20
                training events, as with fewer the row memorises the user.
batch           Events per step: the power of two between 512 and 2,048 with which an epoch still has 47 steps.
epochs          An upper bound: the first stage has about 800 steps, from 4 to 10 epochs; later ones have 2 epochs.
lr              3e-3 in the first stage, 3e-4 in later ones.
ahead           1 if the median user has fewer than 5 events, else 3.
smoothing       0.1 of every target is distributed over its siblings.
evaluate        recall and NDCG at 5 and 10; as many beams as the largest k, at least 20.

The rule does not depend on the machine, so that a scenario means the same everywhere; the plan rejects what does not fit.
docs/reference/settings.md contains the same table with the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nonet.samples.profiles import DataProfile

RARE_ITEM_EVENTS, EVENTS_KEPT = (5, 3, 2), 0.8
LONG_USER_EVENTS, LONG_TEST = 30, 5  # events of the median user from which 5 events are tested
HISTORIES, COVERED = (10, 20, 30, 50), 0.9
# For text columns besides title and categories.
SHARED_TEXT, FILLED, MOST_TEXTS, TEXT_WEIGHT = 0.5, 0.5, 2, 0.3
CODES, ITEMS_A_CODE, REACH = ((5_000, 64), (30_000, 128), (1 << 62, 256)), 4, 16
WIDTHS = ((2_000_000, 64), (1 << 62, 128))  # below this number of training events, this width
LONG_LAYERS, SHORT_LAYERS = 3, 2
DENSE_ITEM_EVENTS, DENSE_DROPOUT, SPARSE_DROPOUT = 20, 0.1, 0.3  # by the mean events per item
USER_ROW_EVENTS, ROW_WIDTH, NEAREST_WIDTH = 20, 32, 64
SHORT_SESSION, AHEAD, SMOOTHING = 5, 3, 0.1
EPOCH_STEPS, LEAST_TOKENS, MOST_TOKENS = 47, 512, 2048
FIRST_STEPS, LEAST_EPOCHS, MOST_EPOCHS, LATER_EPOCHS = 800, 4, 10, 2
FIRST_LR, LATER_LR = 3e-3, 3e-4
CUTOFFS, BEAMS = (5, 10), 20


class Setting(NamedTuple):
    """One derived key.

    Attributes:
        path: The path of the key.
        value: Its value.
        reason: Why it has this value, in a few words.
    """

    path: str
    value: Any
    reason: str


def choose_keep(profile: DataProfile) -> Setting:
    """Choose `data.keep` from the profile of all data."""
    least = next((n for n in RARE_ITEM_EVENTS if profile.compute_kept_share(n) >= EVENTS_KEPT), 0)
    rare = int(profile.items_of[:least].sum())
    reason = (
        f"{rare:,} items have fewer than {least} events, {1 - profile.compute_kept_share(least):.1%} of all"
        if least
        else f"items with fewer than {RARE_ITEM_EVENTS[-1]} events have "
        f"{1 - profile.compute_kept_share(RARE_ITEM_EVENTS[-1]):.0%} of all"
    )
    single = int(profile.users_of[1:2].sum())
    value = {"item_events": least, **({"user_events": 2} if single or least else {})}
    return Setting("data.keep", value, reason + (f"; {single:,} users have one event" if single else ""))


def choose_split(profile: DataProfile, rolls_out: bool) -> Setting:
    """Choose `data.split`.

    Args:
        profile: The profile of the kept data.
        rolls_out: Whether a stage rolls out.
    """
    median = profile.get_length_quantile(0.5)
    test = LONG_TEST if median >= LONG_USER_EVENTS else 1
    rl = test if rolls_out else 0
    value = {"use": "leave_last_out", "test": test, "valid": 1, "rl": rl}
    tested = profile.count_users_above(test + 1 + rl)
    return Setting(
        "data.split",
        value,
        f"the median user has {median} events; {tested:,} of {profile.users:,} users are long enough to be tested",
    )


def choose_rest(
    profile: DataProfile,
    split: Mapping[str, Any],
    supervised: Sequence[str],
    metrics: Sequence[str] | None,
    all_rows: bool = True,
) -> Iterator[Setting]:
    """Yield all other keys.

    Args:
        profile: The profile of the kept data.
        split: The keys of `data.split`.
        supervised: Names of the stages that learn next events, in order.
        metrics: The metrics that the scenario names; None if it names none.
        all_rows: Whether the scenario's tables have a row for every item, or are derived by the rule.
    """
    held_out = count_held_out(split)
    yield _choose_history(profile)
    yield from _choose_tokenizer(profile)
    yield from _choose_model(profile, held_out)
    yield _choose_memory(profile, split, all_rows)
    yield _choose_tables(profile, held_out)
    yield from _choose_stages(profile, held_out, supervised)
    yield from _choose_evaluation(profile, metrics)


def _choose_history(profile: DataProfile) -> Setting:
    """Choose how many events the model sees."""
    covered = profile.get_length_quantile(COVERED)
    history = next((length for length in HISTORIES if length >= covered), HISTORIES[-1])
    return Setting("data.history", history, f"{COVERED:.0%} of the users have at most {covered} events")


def _choose_tokenizer(profile: DataProfile) -> Iterator[Setting]:
    """Yield the vectors, levels and codes of the tokenizer."""
    of = {column.name: column for column in profile.columns if column.filled >= FILLED}
    vectors = [
        name
        for name in ("title", "categories")
        if name in of and of[name].kind in ("text", "list") and of[name].distinct > 1 / max(2, profile.items)
    ]
    texts = [
        name
        for name, column in of.items()
        if name not in ("title", "categories")
        and column.kind in ("text", "list")
        and 1 / max(2, profile.items) < column.distinct <= SHARED_TEXT
    ][:MOST_TEXTS]
    what = (
        f"items have {', '.join([*vectors, *texts])}"
        if vectors or texts
        else "items have no text to learn from"
    )
    sources = [*vectors, *({name: TEXT_WEIGHT} for name in texts), "cooccurrence"]
    yield Setting("tokenizer.vectors", sources, what)
    codes = next(codes for most, codes in CODES if profile.items <= most)
    while codes > 8 and codes * ITEMS_A_CODE > profile.items:
        codes //= 2
    levels = 3
    while codes**levels < REACH * profile.items:
        levels += 1
    yield Setting("tokenizer.levels", levels, f"{codes}^{levels} = {codes**levels:,} ids")
    yield Setting("tokenizer.codes", codes, f"for {profile.items:,} items")


def _choose_model(profile: DataProfile, held_out: int) -> Iterator[Setting]:
    """Yield the width, layers and dropout of the model."""
    trained, median = profile.count_train_events(held_out), profile.get_length_quantile(0.5)
    is_long = median >= LONG_USER_EVENTS
    yield Setting(
        "model.width", next(w for most, w in WIDTHS if trained < most), f"{trained:,} training events"
    )
    said = f"the median user has {median} events, {'at least' if is_long else 'under'} {LONG_USER_EVENTS}"
    yield Setting("model.layers", LONG_LAYERS if is_long else SHORT_LAYERS, said)
    each = profile.events / max(1, profile.items)
    dense = each >= DENSE_ITEM_EVENTS
    said = f"an item has {each:.1f} events on average, {'at least' if dense else 'under'} {DENSE_ITEM_EVENTS}"
    yield Setting("model.dropout", DENSE_DROPOUT if dense else SPARSE_DROPOUT, said)


def _choose_memory(profile: DataProfile, split: Mapping[str, Any], all_rows: bool) -> Setting:
    """Choose the memory and its voters."""
    validates = split.get("valid", 1) not in (0, None)
    if not validates:
        return Setting("model.memory", "off", "no validation events to fit the memory's weight")
    median = profile.get_length_quantile(0.5)
    if median >= LONG_USER_EVENTS or not all_rows:
        return Setting("model.memory", "on", "validation fits the weight of transitions")
    said = f"the median user has {median} events: the items nearest to a user's state vote too"
    return Setting("model.memory", {"voters": ["transitions", "nearest"]}, said)


def _choose_tables(profile: DataProfile, held_out: int) -> Setting:
    """Choose the tables of sparse rows and their widths."""
    median = profile.get_median_train_length(held_out)
    has = median >= USER_ROW_EVENTS
    width = ROW_WIDTH if profile.get_length_quantile(0.5) >= LONG_USER_EVENTS else NEAREST_WIDTH
    said = "yes" if has else "none"
    return Setting(
        "sparse.tables",
        {"item": {"dim": width}, **({"user": {"dim": ROW_WIDTH}} if has else {})},
        f"user table: {said} (the median user has {median} training events; {USER_ROW_EVENTS} are needed)",
    )


def _choose_stages(profile: DataProfile, held_out: int, supervised: Sequence[str]) -> Iterator[Setting]:
    """Yield the batch, epochs, learning rate, steps ahead and smoothing of every supervised stage."""
    trained = profile.count_train_events(held_out)
    tokens = LEAST_TOKENS
    while tokens < MOST_TOKENS and 2 * tokens * EPOCH_STEPS <= trained:
        tokens *= 2
    steps = max(1, round(trained / tokens))
    epochs = min(MOST_EPOCHS, max(LEAST_EPOCHS, round(FIRST_STEPS / steps)))
    for i, name in enumerate(supervised):
        path = f"stages.{name}"
        yield Setting(
            f"{path}.batch", {"tokens": float(tokens)}, f"{steps} steps per epoch of {trained:,} events"
        )
        count = LATER_EPOCHS if i else epochs
        yield Setting(
            f"{path}.epochs",
            count,
            f"about {count * steps:,} steps" if not i else "continues from the stage before",
        )
        yield Setting(
            f"{path}.lr",
            LATER_LR if i else FIRST_LR,
            "later stages use a lower rate" if i else "the first stage",
        )
        median = profile.get_length_quantile(0.5)
        yield Setting(
            f"{path}.ahead",
            1 if median < SHORT_SESSION else AHEAD,
            f"the median user has {median} events, {'under' if median < SHORT_SESSION else 'at least'} {SHORT_SESSION}",
        )
        yield Setting(f"{path}.smoothing", SMOOTHING, "a target's siblings are likely too")


def _choose_evaluation(profile: DataProfile, metrics: Sequence[str] | None) -> Iterator[Setting]:
    """Yield the metrics and the number of beams."""
    cutoffs = [k for k in CUTOFFS if k <= max(1, profile.items // 2)] or [1]
    ours = [f"{name}@{k}" for name in ("recall", "ndcg") for k in cutoffs]
    yield Setting("evaluate.metrics", ours, f"a catalogue of {profile.items:,}")
    tails = [metric.rpartition("@")[2] for metric in (metrics or ours)]
    largest = max([int(tail) for tail in tails if tail.isdecimal()], default=0)
    yield Setting("evaluate.width", max(BEAMS, largest), f"the largest k is {largest}")


def count_held_out(split: Mapping[str, Any]) -> int:
    """Return how many events per user a split holds out.

    Args:
        split: The keys of `data.split`.

    Returns:
        The number of events; 0 for a split by time, which has no fixed number.
    """
    if split.get("use", "leave_last_out") != "leave_last_out":
        return 0
    defaults = {"test": 1, "valid": 1, "rl": 0}
    counts = [split.get(name, default) for name, default in defaults.items()]
    return sum(count for count in counts if isinstance(count, int))
