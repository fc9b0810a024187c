"""What a supervised stage's keys ask of the data is checked before a device is taken."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from nonet.controller.stages.supervised import Supervised, SupervisedKind
from nonet.errors import ConfigError


class Events(SimpleNamespace):
    def iterate_parts(self):
        return [self]


def _check(column, **keys):
    seq = Events(columns={"shown": np.asarray(column)}, event_names=("view", "buy"))
    SupervisedKind().check_data("pretrain", Supervised(epochs=1, **keys), seq)


def test_propensities_are_chances_or_unknown():
    _check(np.array([0.1, 1.0, np.nan], np.float32), propensity={"column": "shown"})


@pytest.mark.parametrize(
    "column", [np.array([0.0, 0.5], np.float32), np.array([1.5], np.float32), np.array([1, 2])]
)
def test_other_numbers_are_no_propensities(column):
    with pytest.raises(ConfigError, match="must hold probabilities above 0 and up to 1"):
        _check(column, propensity={"column": "shown"})


def test_a_column_or_a_kind_that_is_not_there_is_named_beside_those_that_are():
    with pytest.raises(ConfigError, match=r"no 'showm'; it carries shown\. Did you mean .?shown"):
        _check(np.ones(1, np.float32), propensity={"column": "showm"})
    with pytest.raises(ConfigError, match="no event 'bye'; its kinds are view, buy"):
        _check(np.ones(1, np.float32), weight={"bye": 2.0})
