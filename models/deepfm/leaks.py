"""Columns that reveal the label: those in a target's condition, and those whose values separate the labels."""

# Shapes: N events, P training rows.

from __future__ import annotations

import ast
from collections.abc import Mapping

import numpy as np

from nonet.models.deepfm.metrics import auc

_LEAST_EVENTS = 5  # of a value, for it to count
_LEAST_SHARE = 0.5  # of the rows that such values must cover
_SEPARATES = 0.999


def find_columns(condition: str) -> set[str]:
    """Return the columns in a condition over columns and literals; empty if it is not a condition, which is reported later."""
    try:
        ast.parse(condition.strip(), mode="eval")
    except SyntaxError:
        return set()
    return {
        node.id for node in ast.walk(ast.parse(condition.strip(), mode="eval")) if isinstance(node, ast.Name)
    }


def find_separating_columns(columns: Mapping[str, np.ndarray], label_P: np.ndarray) -> dict[str, float]:
    """Find columns whose values separate the training labels, as a copy of the label or a result of it does.

    A value counts where it occurs at least five times. Its score is the mean label of its rows.

    Args:
        columns: Values [P] of the training rows, by column.
        label_P: Their labels, 1 or 0.

    Returns:
        The AUC of each column whose AUC is above 0.999.
    """
    leaking = {}
    for name, value_P in columns.items():
        _, place, count = np.unique(value_P, return_inverse=True, return_counts=True)
        often = count[place] >= _LEAST_EVENTS
        label = label_P[often] > 0
        if often.mean() < _LEAST_SHARE or label.all() or not label.any():
            continue
        mean = np.bincount(place[often], label, len(count)) / np.maximum(
            1, np.bincount(place[often], minlength=len(count))
        )
        value = auc(mean[place[often]], label)
        if value > _SEPARATES:
            leaking[name] = value
    return leaking
