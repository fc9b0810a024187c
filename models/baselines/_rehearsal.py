"""Rehearsal: runs a user-defined baseline on little data before anything is trained.

A new instance is fitted on the first users and scores a few prompts, so that a wrong shape is found in the first seconds of a run
and not after an hour of fitting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nonet.errors import DataError
from nonet.models.baselines.kinds import SparseVotes

if TYPE_CHECKING:
    from nonet.models.baselines.kinds import Baseline
    from nonet.samples.sequences import Sequences

# Shapes: P prompts, I items.
_MAX_USERS = 200
_MAX_PROMPTS = 4


def rehearse(name: str, make: Callable[[], Baseline], seq: Sequences, n_items: int) -> None:
    """Fit a baseline on the first users and check its scores.

    Args:
        name: Name of the baseline.
        make: Creates the baseline.
        seq: The sequences.
        n_items: Number of items.

    Raises:
        DataError: The baseline fails, or its scores cannot be ranked.
    """
    first_users = _select_first_users(seq, _MAX_USERS)
    users = np.flatnonzero(first_users.lengths)[:_MAX_PROMPTS]
    title = f"baseline {name!r}: on the first {len(first_users)} users"
    try:
        fitted = make().fit(first_users)
        if not callable(getattr(fitted, "scores", None)):
            raise DataError(f"{title} fit returned {fitted!r}; it must return the baseline itself")
        scores = fitted.scores(first_users, users, first_users.lengths[users] - 1)
    except DataError:
        raise
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{title} it failed: {cause}") from error
    check_scores(name, scores, len(users), n_items)


def check_scores(name: str, scores: Any, prompts: int, n_items: int) -> Any:
    """Return the scores of a baseline if they are floats [P, I] without NaN, or votes without NaN.

    Args:
        name: Name of the baseline.
        scores: The scores.
        prompts: Number of prompts P.
        n_items: Number of items I.

    Raises:
        DataError: The scores have another type, shape or dtype, or contain NaN.
    """
    expected = f"wanted float32 [{prompts}, {n_items}], a row per prompt and a column per item"
    if isinstance(scores, SparseVotes):
        is_nan_P = np.full(prompts, bool(np.isnan(scores.prior).any()))
        is_nan_P[scores.prompt[np.isnan(scores.weight)]] = True
        _require_numbers(name, is_nan_P, expected)
        return scores
    if not isinstance(scores, np.ndarray):
        raise DataError(f"baseline {name!r}: scores are a {type(scores).__name__}; {expected}, a NumPy array")
    if scores.shape != (prompts, n_items) or scores.dtype not in (np.float32, np.float64):
        raise DataError(f"baseline {name!r}: scores are {scores.dtype} {list(scores.shape)}; {expected}")
    _require_numbers(name, np.asarray(np.isnan(scores).any(1)), expected)
    return scores


def _require_numbers(name: str, is_nan_P: np.ndarray, expected: str) -> None:
    """Raise DataError if scores of a prompt are NaN."""
    if is_nan_P.any():
        raise DataError(
            f"baseline {name!r}: scores of {int(is_nan_P.sum())} of {len(is_nan_P)} prompts are NaN, the first is row "
            f"{int(is_nan_P.argmax())}; {expected}, -inf for what is never recommended"
        )


def _select_first_users(seq: Sequences, max_users: int) -> Sequences:
    """Return the sequences of the first users only; items keep their indices."""
    return seq.slice_users(0, min(len(seq), max_users))
