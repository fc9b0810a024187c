"""Columns that reveal the label: those in a target's condition, and those whose values separate the labels."""

# Shapes: N events, P training rows.

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nonet.models.clicks.metrics import auc, is_defined

_MIN_VALUE_ROWS = 5  # Rows that a value must have to be considered.
_MIN_ROW_SHARE = 0.5  # Share of the rows that such values must have for a column to be considered.
_MAX_AUC = 0.999  # AUC above which a column reveals the label.


def find_separating_columns(columns: Mapping[str, np.ndarray], label_P: np.ndarray) -> dict[str, float]:
    """Find columns whose values separate the training labels, such as a copy of the label or a value derived from it.

    Rows are scored by the mean label of all rows with the same value; rare values are ignored.

    Args:
        columns: Values [P] of the training rows, by column.
        label_P: Their labels, 1 or 0.

    Returns:
        The AUC of each column whose AUC is above 0.999.
    """
    leaking = {}
    for name, value_P in columns.items():
        _, value_index, count_by_value = np.unique(value_P, return_inverse=True, return_counts=True)
        is_frequent_P = count_by_value[value_index] >= _MIN_VALUE_ROWS
        label = label_P[is_frequent_P] > 0
        if not is_defined("auc", label) or is_frequent_P.mean() < _MIN_ROW_SHARE:
            continue
        index, n_values = value_index[is_frequent_P], len(count_by_value)
        label_sum = np.bincount(index, label, n_values)
        mean_label = label_sum / np.maximum(1, np.bincount(index, minlength=n_values))
        column_auc = auc(mean_label[index], label)
        if column_auc > _MAX_AUC:
            leaking[name] = column_auc
    return leaking
