"""The rule that derives settings from the profile of a data set. Its numbers are constants in this file.

data.keep       Items with fewer than 5 events are dropped if 80 % of the events remain; otherwise the threshold is 3, 2, or none.
                Users with one event are dropped, as they have no next event.
data.split      5 test events if the median user has 30 events, else 1; 1 validation event. If a stage rolls out, as many RL
                events as test events are held out too.
data.history    Covers 90 % of the users, between 10 and 50 events.
tokenizer       Vectors from cooccurrence, and from the title, the categories and other text that items share. 64 codes per level
                up to 5,000 items, 128 up to 30,000, 256 above; fewer if there are fewer than 4 items per code. 3 levels, more
                if the codes would give fewer than 16 ids per item.
model           Width 64, 128 from 2 M training events on; 3 layers if the median user has 30 events, else 2; dropout 0.1 if an
                item has 20 events, else 0.3. A memory of transitions and co-occurrence, whose weight is fitted to validation; the
                k-th newest event votes with weight 1 / k, or 1 / k^2 if the median user has fewer than 5 events; below 30, the
                items nearest to a user's state vote too.
sparse.tables   An `item` row of 64 numbers, of 32 if the median user has 30 events; a `user` row if the median user has 20
                training events, as with fewer the row memorises the user.
batch           Events per step: the power of two between 512 and 2,048 with which an epoch still has 47 steps.
epochs          An upper bound: the first stage has about 800 steps, from 4 to 10 epochs; later ones have 2 epochs.
lr              3e-3 in the first stage, 3e-4 in later ones.
ahead           1 if the median user has fewer than 5 events, else 3.
smoothing       0.1 of every target is distributed over its siblings.
stop            The first stage ends with the checkpoint of the lowest validation nats, which differ less by chance than ranks.
evaluate        recall and NDCG at 5 and 10; as many beams as the largest k, at least 20.

The rule does not depend on the machine, so that a scenario means the same everywhere; the plan rejects what does not fit.
docs/reference/settings.md contains the same table with the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nonet.samples.profiles import DataProfile

# Items with fewer events are dropped: the first of these thresholds is chosen that keeps this share of all events.
KEEP_THRESHOLDS, MIN_KEPT_SHARE = (5, 3, 2), 0.8
# The votes of a memory: chosen on validation of five data sets (docs/benchmarks/quality.md, "What was tried").
MEMORY: dict[str, Any] = {
    "voters": ["transitions", "cooccurrence"],
    "last": 10,
    "decay": "validation",
    "reach": 6,
    "reverse": 0.3,
}
LONG_USER_EVENTS = 30  # events of the median user from which users count as long
LONG_TEST = 5  # test events per user if users are long, else 1
# The shortest of these histories that holds all events of this share of the users is chosen.
HISTORIES, COVERED_SHARE = (10, 20, 30, 50), 0.9
# Text columns besides title and categories are used if at least MIN_FILLED of the items have a value and the values are
# shared (distinct values per item are at most MAX_DISTINCT); at most MAX_TEXTS of them, each with this weight.
MIN_FILLED, MAX_DISTINCT, MAX_TEXTS, TEXT_WEIGHT = 0.5, 0.5, 2, 0.3
# (n, c): c codes per level up to n items
CODES_BY_MAX_ITEMS = ((5_000, 64), (30_000, 128), (1 << 62, 256))
MIN_ITEMS_PER_CODE = 4  # else the codes are halved
MIN_IDS_PER_ITEM = 16  # else a level is added
WIDTH_BY_TRAIN_EVENTS = ((2_000_000, 64), (1 << 62, 128))  # below this number of training events, this width
LONG_LAYERS, SHORT_LAYERS = 3, 2  # for long users, and for others
DENSE_ITEM_EVENTS, DENSE_DROPOUT, SPARSE_DROPOUT = 20, 0.1, 0.3  # by the mean events per item
USER_ROW_EVENTS = 20  # training events of the median user from which a table of users does not memorise them
ROW_WIDTH, NEAREST_WIDTH = 32, 64  # of rows; the second where the memory compares rows of items
# A position has the next AHEAD events as targets if the median user has SHORT_SESSION events, else the next event.
SHORT_SESSION, AHEAD = 5, 3
SMOOTHING = 0.1  # share of a target that is distributed over its siblings
# The batch is the largest number of events in this range with which an epoch has so many steps.
MIN_EPOCH_STEPS, MIN_TOKENS, MAX_TOKENS = 47, 512, 2048
# The first stage has about this many steps, if its epochs are in this range.
FIRST_STEPS, MIN_EPOCHS, MAX_EPOCHS = 800, 4, 10
LATER_EPOCHS = 2
FIRST_LR, LATER_LR = 3e-3, 3e-4
CUTOFFS = (5, 10)  # of recall and NDCG
MIN_BEAMS = 20


class Setting(NamedTuple):
    """One derived key.

    Attributes:
        path: The path of the key in the scenario.
        value: The derived value.
        reason: Why the key has this value, in a few words.
    """

    path: str
    value: Any
    reason: str


def choose_keep(profile: DataProfile, has_cold_items: bool = False) -> Setting:
    """Choose `data.keep` from the profile of all data.

    Args:
        profile: The profile.
        has_cold_items: Whether the memory recommends items without events, which then stay in the catalogue.
    """
    thresholds = () if has_cold_items else KEEP_THRESHOLDS
    min_events = next((n for n in thresholds if profile.compute_kept_share(n) >= MIN_KEPT_SHARE), 0)
    rare_items = int(profile.items_of[:min_events].sum())
    reason = (
        "the memory's voter cold recommends items without events"
        if has_cold_items
        else f"{rare_items:,} items have fewer than {min_events} events, "
        f"{1 - profile.compute_kept_share(min_events):.1%} of all"
        if min_events
        else f"items with fewer than {KEEP_THRESHOLDS[-1]} events have "
        f"{1 - profile.compute_kept_share(KEEP_THRESHOLDS[-1]):.0%} of all"
    )
    single_users = int(profile.users_of[1:2].sum())  # users with one event
    # Dropping items can leave users with one event even where there were none.
    value = {"item_events": min_events, **({"user_events": 2} if single_users or min_events else {})}
    return Setting(
        "data.keep", value, reason + (f"; {single_users:,} users have one event" if single_users else "")
    )


def choose_split(profile: DataProfile, rolls_out: bool) -> Setting:
    """Choose `data.split`.

    Args:
        profile: The profile of the kept data.
        rolls_out: Whether a stage rolls out.
    """
    median_events = profile.get_length_quantile(0.5)
    test = LONG_TEST if median_events >= LONG_USER_EVENTS else 1
    rl = test if rolls_out else 0
    value = {"use": "leave_last_out", "test": test, "valid": 1, "rl": rl}
    tested_users = profile.count_users_above(test + 1 + rl)  # with more events than are held out
    return Setting(
        "data.split",
        value,
        f"the median user has {median_events} events; {tested_users:,} of {profile.users:,} users are long enough to be tested",
    )


def choose_rest(
    profile: DataProfile,
    split: Mapping[str, Any],
    supervised: Sequence[str],
    metrics: Sequence[str] | None,
    all_rows: bool = True,
    vectors: Sequence[str] = (),
) -> Iterator[Setting]:
    """Yield the settings of all keys but `data.keep` and `data.split`.

    Args:
        profile: The profile of the kept data.
        split: The keys of `data.split`.
        supervised: Names of the stages that learn next events, in order.
        metrics: The metrics that the scenario names; None if it names none.
        all_rows: Whether a table has a row for every item; True if the scenario leaves the tables to the rule.
        vectors: Names of `data.vectors`.
    """
    held_out_events = count_held_out(split)
    columns = {column.name for column in profile.columns}
    # A name that the items have already is refused when the data are checked.
    vectors = [name for name in vectors if name not in columns]
    yield _choose_history(profile)
    yield from _choose_tokenizer(profile, vectors)
    yield from _choose_model(profile, held_out_events)
    yield _choose_memory(profile, split, all_rows, vectors)
    yield _choose_tables(profile, held_out_events)
    yield from _choose_stages(profile, held_out_events, supervised, _has_validation(split))
    yield from _choose_evaluation(profile, metrics)


def _choose_history(profile: DataProfile) -> Setting:
    """Choose how many events of a user the model sees."""
    covered_events = profile.get_length_quantile(COVERED_SHARE)
    history = next((length for length in HISTORIES if length >= covered_events), HISTORIES[-1])
    return Setting(
        "data.history", history, f"{COVERED_SHARE:.0%} of the users have at most {covered_events} events"
    )


def _select_texts(profile: DataProfile) -> tuple[list[str], list[str]]:
    """Return the columns of words that items are described by: title and categories, and up to `MAX_TEXTS` others."""
    one_value = 1 / max(2, profile.items)  # the share of distinct values of a column that has only one
    text_columns = {
        column.name: column
        for column in profile.columns
        if column.filled >= MIN_FILLED and column.kind in ("text", "list") and column.distinct > one_value
    }
    main_texts = [name for name in ("title", "categories") if name in text_columns]
    other_texts = [
        name
        for name, column in text_columns.items()
        if name not in ("title", "categories") and column.distinct <= MAX_DISTINCT
    ][:MAX_TEXTS]
    return main_texts, other_texts


def _choose_tokenizer(profile: DataProfile, vector_columns: Sequence[str]) -> Iterator[Setting]:
    """Yield the vectors, levels and codes of the tokenizer."""
    main_texts, other_texts = _select_texts(profile)
    reason = (
        f"items have {', '.join([*main_texts, *other_texts, *vector_columns])}"
        if main_texts or other_texts or vector_columns
        else "items have no text to learn from"
    )
    vectors = [*main_texts, *({name: TEXT_WEIGHT} for name in other_texts), *vector_columns, "cooccurrence"]
    yield Setting("tokenizer.vectors", vectors, reason)
    codes = next(codes for max_items, codes in CODES_BY_MAX_ITEMS if profile.items <= max_items)
    while codes > 8 and codes * MIN_ITEMS_PER_CODE > profile.items:
        codes //= 2
    levels = 3
    while codes**levels < MIN_IDS_PER_ITEM * profile.items:
        levels += 1
    yield Setting("tokenizer.levels", levels, f"{codes}^{levels} = {codes**levels:,} ids")
    yield Setting("tokenizer.codes", codes, f"for {profile.items:,} items")


def _choose_model(profile: DataProfile, held_out_events: int) -> Iterator[Setting]:
    """Yield the width, layers and dropout of the model."""
    train_events = profile.count_train_events(held_out_events)
    median_events = profile.get_length_quantile(0.5)
    width = next(width for max_events, width in WIDTH_BY_TRAIN_EVENTS if train_events < max_events)
    yield Setting("model.width", width, f"{train_events:,} training events")
    is_long = median_events >= LONG_USER_EVENTS
    reason = (
        f"the median user has {median_events} events, {'at least' if is_long else 'under'} {LONG_USER_EVENTS}"
    )
    yield Setting("model.layers", LONG_LAYERS if is_long else SHORT_LAYERS, reason)
    mean_events = profile.events / max(1, profile.items)
    is_dense = mean_events >= DENSE_ITEM_EVENTS
    side = "at least" if is_dense else "under"
    reason = f"an item has {mean_events:.1f} events on average, {side} {DENSE_ITEM_EVENTS}"
    yield Setting("model.dropout", DENSE_DROPOUT if is_dense else SPARSE_DROPOUT, reason)


def _choose_memory(
    profile: DataProfile, split: Mapping[str, Any], all_rows: bool, vector_columns: Sequence[str]
) -> Setting:
    """Choose whether the model has a memory, and its voters."""
    if not _has_validation(split):
        return Setting("model.memory", "off", "no validation events to fit the memory's weight")
    memory: dict[str, Any] = {**MEMORY, "voters": list(MEMORY["voters"])}
    reason = "validation chooses the decay of older events' votes, and fits the weight of transitions and co-occurrence"
    if signals := [*(name for names in _select_texts(profile) for name in names), *vector_columns]:
        memory["signals"] = signals
        reason += f" and of similarity in {', '.join(signals)}"
    median_events = profile.get_length_quantile(0.5)
    if median_events < LONG_USER_EVENTS and all_rows:
        memory["voters"] = [*memory["voters"], "nearest"]
        reason += (
            f"; the median user has {median_events} events: the items nearest to a user's state vote too"
        )
    return Setting("model.memory", memory, reason)


def _has_validation(split: Mapping[str, Any]) -> bool:
    """Return whether a split holds out validation events."""
    return split.get("valid", 1) not in (0, None)


def _choose_tables(profile: DataProfile, held_out_events: int) -> Setting:
    """Choose the tables of sparse rows and the widths of their rows."""
    median_train_events = profile.get_median_train_length(held_out_events)
    has_user_table = median_train_events >= USER_ROW_EVENTS
    width = ROW_WIDTH if profile.get_length_quantile(0.5) >= LONG_USER_EVENTS else NEAREST_WIDTH
    return Setting(
        "sparse.tables",
        {"item": {"dim": width}, **({"user": {"dim": ROW_WIDTH}} if has_user_table else {})},
        f"user table: {'yes' if has_user_table else 'none'} (the median user has {median_train_events} training events; "
        f"{USER_ROW_EVENTS} are needed)",
    )


def _choose_stages(
    profile: DataProfile, held_out_events: int, supervised: Sequence[str], has_validation: bool
) -> Iterator[Setting]:
    """Yield the batch, epochs, learning rate, `ahead`, smoothing and, if it is validated, the end of supervised stages."""
    train_events = profile.count_train_events(held_out_events)
    median_events = profile.get_length_quantile(0.5)
    batch_tokens = MIN_TOKENS
    while batch_tokens < MAX_TOKENS and 2 * batch_tokens * MIN_EPOCH_STEPS <= train_events:
        batch_tokens *= 2
    epoch_steps = max(1, round(train_events / batch_tokens))
    first_epochs = min(MAX_EPOCHS, max(MIN_EPOCHS, round(FIRST_STEPS / epoch_steps)))
    for index, name in enumerate(supervised):
        path, is_first = f"stages.{name}", index == 0
        yield Setting(
            f"{path}.batch",
            {"tokens": float(batch_tokens)},
            f"{epoch_steps} steps per epoch of {train_events:,} events",
        )
        yield Setting(
            f"{path}.epochs",
            first_epochs if is_first else LATER_EPOCHS,
            f"about {first_epochs * epoch_steps:,} steps" if is_first else "continues from the stage before",
        )
        yield Setting(
            f"{path}.lr",
            FIRST_LR if is_first else LATER_LR,
            "the first stage" if is_first else "later stages use a lower rate",
        )
        yield Setting(
            f"{path}.ahead",
            1 if median_events < SHORT_SESSION else AHEAD,
            f"the median user has {median_events} events, "
            f"{'under' if median_events < SHORT_SESSION else 'at least'} {SHORT_SESSION}",
        )
        yield Setting(f"{path}.smoothing", SMOOTHING, "a target's siblings are likely too")
        if is_first and has_validation:
            yield Setting(f"{path}.stop.by", "nats", "nats of validation differ less by chance than ranks")


def _choose_evaluation(profile: DataProfile, metrics: Sequence[str] | None) -> Iterator[Setting]:
    """Yield the metrics and the number of beams of the evaluation.

    Args:
        profile: The profile of the kept data.
        metrics: The metrics that the scenario names, such as "recall@10"; None if it names none.
    """
    cutoffs = [k for k in CUTOFFS if k <= max(1, profile.items // 2)] or [1]
    derived_metrics = [f"{name}@{k}" for name in ("recall", "ndcg") for k in cutoffs]
    yield Setting("evaluate.metrics", derived_metrics, f"a catalogue of {profile.items:,}")
    suffixes = [metric.rpartition("@")[2] for metric in (metrics or derived_metrics)]
    largest_k = max([int(suffix) for suffix in suffixes if suffix.isdecimal()], default=0)
    yield Setting("evaluate.width", max(MIN_BEAMS, largest_k), f"the largest k is {largest_k}")


def count_held_out(split: Mapping[str, Any]) -> int:
    """Return how many events of each user a split holds out.

    Args:
        split: The keys of `data.split`.

    Returns:
        The number of events per user; 0 for a split by time, which has no fixed number.
    """
    if split.get("use", "leave_last_out") != "leave_last_out":
        return 0
    defaults = {"test": 1, "valid": 1, "rl": 0}
    counts = [split.get(name, default) for name, default in defaults.items()]
    return sum(count for count in counts if isinstance(count, int))
