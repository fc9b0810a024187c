"""Full-ranking metrics: the rank of a held-out item among the whole catalogue, and statistics of ranks.

The best rank is 0. A masked item is in no list, so a masked target has no rank and is MISSED. Equal scores are ordered by
`make_tie_order`: by popularity, then by a seeded permutation. The item index is not used, because it often correlates with
popularity or age and would favour a model without information. Differences come with a paired bootstrap over users (95 %), not
over events, since the events of one user are not independent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nonet.errors import ConfigError, DataError
from nonet.models.ranking.kinds import (
    METRICS,
    MISSED,
    EventMetric,
    ListAccumulator,
    ListCatalogue,
    ListMetric,
    RankingMetric,
)
from nonet.random import rng
from nonet.run_code import is_code_reference
from nonet.suggest import join_names, suggest_sentence
from nonet.types import Jagged

# Shapes: P prompts (held-out events), I items of the catalogue, U users, W recommended items.

_Z_95 = 1.959964  # Quantile of the normal distribution for 95 % intervals.


def parse_metric(name: str) -> tuple[str, int | None]:
    """Split a metric of a scenario into its kind and its number of items: `recall@10` is ("recall", 10).

    Raises:
        ConfigError: There is no such metric, or it lacks its number of items.
    """
    kind, _, k = _resolve_metric(name)
    return kind, k


def _resolve_metric(name: str) -> tuple[str, RankingMetric, int | None]:
    """Return the kind of the metric `name`, its spec, and its number of items k, None without one; see `parse_metric`."""
    match = re.fullmatch(r"(.*?)(?:@(\d+))?", str(name).strip())
    assert match is not None  # the expression matches every line
    kind, k = match[1], int(match[2]) if match[2] else None
    if not is_code_reference(kind) and kind not in METRICS.list_names():
        names = METRICS.list_names()
        raise ConfigError(
            f"evaluate.metrics: unknown metric {name!r}; there are {join_names(f'{m}@k' for m in names)}."
            f"{suggest_sentence(kind, names)}"
        )
    address = getattr(name, "address", name)
    spec = METRICS.get(address.removesuffix(f"@{match[2]}").strip() if match[2] else address.strip())
    if k == 0 or (k is None and getattr(spec, "needs_k", True)):
        raise ConfigError(
            f"evaluate.metrics: {name!r} needs a number of items, at least 1, such as {kind}@10."
        )
    return kind, spec, k


def select_event_metrics(names: Iterable[str]) -> list[str]:
    """Return the metrics that are defined per event, so that two subjects can be compared event by event."""
    return [name for name in names if isinstance(_resolve_metric(name)[1], EventMetric)]


def list_depth(names: Iterable[str], width: int) -> int:
    """Return the length of lists that these metrics need: the largest k, `width` for a list metric without k, or 0 for none."""
    resolved = [_resolve_metric(name) for name in names]
    return max((k or width for _, spec, k in resolved if isinstance(spec, ListMetric)), default=0)


def make_accumulators(names: Iterable[str], catalogue: ListCatalogue) -> dict[str, ListAccumulator]:
    """Return an empty accumulator for each kind of list metric among these metrics, by kind."""
    resolved = [_resolve_metric(name) for name in names]
    return {kind: spec.make(catalogue) for kind, spec, _ in resolved if isinstance(spec, ListMetric)}


def make_tie_order(popularity_I: np.ndarray, seed: int) -> np.ndarray:
    """Return the order [I] int64 of items with equal scores, in which a lower number is ranked first.

    The order is by popularity, highest first, then by a permutation drawn from `seed`.
    """
    noise = rng(seed, "ties").permutation(len(popularity_I))
    tie_order = np.empty(len(popularity_I), np.int64)
    tie_order[np.lexsort((noise, -np.asarray(popularity_I, np.float64)))] = np.arange(len(popularity_I))
    return tie_order


def rank_of_target_np(
    scores_PI: np.ndarray, target_P: np.ndarray, masked: Jagged, tie_I: np.ndarray | None = None
) -> np.ndarray:
    """Rank the targets among the items that are not masked; higher scores are better.

    Args:
        scores_PI: Scores of all items.
        target_P: Items of the targets.
        masked: Masked items of each prompt; an item may occur twice.
        tie_I: Result of `make_tie_order`; None for a permutation drawn from seed 0.

    Returns:
        Ranks [P] int64; 0 is best, MISSED for a target that is masked or has score -inf (outside the catalogue).

    Raises:
        DataError: A score is NaN.
    """
    P, I = scores_PI.shape  # noqa: E741
    tie = make_tie_order(np.zeros(I), seed=0) if tie_I is None else tie_I
    if np.isnan(scores_PI).any():
        bad_prompts = np.flatnonzero(np.isnan(scores_PI).any(axis=1))
        raise DataError(
            f"{len(bad_prompts)} of {P} prompts have a score that is NaN, the first: {join_names(bad_prompts[:5])}."
        )
    # Score and tie order of the targets.
    score_P1 = scores_PI[np.arange(P), target_P][:, None]
    tie_P1 = tie[target_P][:, None]
    n_ahead_P = (scores_PI > score_P1).sum(1) + ((scores_PI == score_P1) & (tie < tie_P1)).sum(1)
    # Masked items that are ahead of the target do not count.
    prompt, item = _list_distinct_pairs(masked, I)
    masked_score = scores_PI[prompt, item]
    was_ahead = (masked_score > score_P1[prompt, 0]) | (
        (masked_score == score_P1[prompt, 0]) & (tie[item] < tie_P1[prompt, 0])
    )
    ranks = n_ahead_P - np.bincount(prompt, weights=was_ahead, minlength=P).astype(np.int64)
    ranks[prompt[item == target_P[prompt]]] = MISSED
    ranks[np.isneginf(score_P1[:, 0])] = MISSED
    return ranks


def compute_per_event(metric: str, ranks: np.ndarray) -> np.ndarray:
    """Return the metric of each held-out event, [P] float64, such as 1 or 0 for recall@k.

    Args:
        metric: Name of the metric.
        ranks: Rank [P] of each event's target.

    Raises:
        ConfigError: The metric is not defined per event.
    """
    _, spec, k = _resolve_metric(metric)
    if not isinstance(spec, EventMetric) or k is None:
        raise ConfigError(f"{metric} is a metric of whole lists of recommendations, not of one event.")
    return spec.compute(np.asarray(ranks), k)


def summarise(
    ranks: np.ndarray, metrics: Iterable[str], lists: Mapping[str, ListAccumulator] | None = None
) -> dict[str, float]:
    """Compute the mean of each metric over events, by name.

    Args:
        ranks: Rank of each event [P].
        metrics: Names of the metrics.
        lists: Accumulators of the list metrics by kind (`make_accumulators`), with all lists added.

    Raises:
        DataError: There is no event.
        ConfigError: A metric needs lists that were not accumulated.
    """
    if not len(ranks):
        raise DataError("no held-out event to evaluate; the split or the target condition leaves none.")
    values: dict[str, float] = {}
    for name in metrics:
        kind, spec, k = _resolve_metric(name)
        if isinstance(spec, EventMetric):
            values[name] = float(compute_per_event(name, ranks).mean())
        elif lists is None or kind not in lists:
            raise ConfigError(f"{name} needs the recommended items, which ranks alone do not hold.")
        else:
            values[name] = lists[kind].compute(k)
    return values


def compare_paired(
    a: np.ndarray, b: np.ndarray, user: np.ndarray, seed: int, *, resamples: int = 2000
) -> dict[str, float]:
    """Compute the mean of a - b over events, with a 95 % interval from resampling users with replacement.

    Args:
        a: Metric of the events [P] for one subject.
        b: Metric of the same events for the other one.
        user: User of each event [P], any integers.
        seed: Seed of the resampling.
        resamples: Number of resamples.

    Returns:
        The mean "diff", and the limits "low" and "high" of the interval.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape or len(a) != len(user) or not len(a):
        raise ValueError(
            f"a, b and user must have one value per event, got {a.shape}, {b.shape} and {len(user)}"
        )
    total_U, events_U = _sum_by_user(a - b, user)
    generator = rng(seed, "bootstrap")
    means = []
    # Draws of at most 4 M numbers are made at once.
    for n_resamples in _split_sizes(resamples, max(1, 4_000_000 // len(total_U))):
        user_RU = generator.integers(0, len(total_U), size=(n_resamples, len(total_U)))
        means.append(total_U[user_RU].sum(1) / events_U[user_RU].sum(1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return {"diff": float((a - b).mean()), "low": float(low), "high": float(high)}


def compute_half_width(values: np.ndarray, user: np.ndarray, total_users: int) -> float:
    """Return half the width of the 95 % confidence interval of a metric's mean over all users, if only some were drawn.

    It is the interval of a ratio of totals with the correction for a finite population (Cochran, Sampling Techniques, 1977,
    2.11).

    Args:
        values: Metric of each event [P].
        user: User of each event [P].
        total_users: Number of all users.

    Returns:
        The half-width; 0 if all users were ranked.
    """
    total_U, events_U = _sum_by_user(values, user)
    n_drawn = len(total_U)
    if n_drawn >= total_users or n_drawn < 2:
        return 0.0
    residual_U = total_U - total_U.sum() / events_U.sum() * events_U
    variance = (residual_U @ residual_U) / (n_drawn - 1) / n_drawn * (1 - n_drawn / total_users)
    return float(_Z_95 * np.sqrt(variance) / events_U.mean())


def _sum_by_user(values: np.ndarray, user: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of each user's values [U], and their number [U]."""
    _, user_index = np.unique(user, return_inverse=True)
    return np.bincount(user_index, weights=values), np.bincount(user_index)


def is_significant(difference: dict[str, float]) -> bool:
    """Return whether the interval of `compare_paired` excludes zero."""
    return difference["low"] > 0 or difference["high"] < 0


def _list_distinct_pairs(masked: Jagged, n_items: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct (prompt, item) pairs of the masked items, as prompts and items."""
    lengths = np.diff(np.asarray(masked.offsets, np.int64))
    pair = np.repeat(np.arange(len(lengths)), lengths) * n_items + np.asarray(masked.values)
    pair = np.unique(pair)
    return pair // n_items, pair % n_items


def _split_sizes(total: int, max_size: int) -> Sequence[int]:
    """Split a number into parts of at most `max_size`."""
    return [min(max_size, total - start) for start in range(0, total, max_size)]
