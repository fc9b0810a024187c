"""The receipt's bench judges what was measured; here on made-up measurements, so that its verdict itself is tested."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from nonet.bench.runs import receipt as bench
from nonet.controller.predict import calibration
from nonet.controller.predict.calibration import NOMINAL
from nonet.controller.predict.prediction import DataFacts
from nonet.random import rng

FACTS = DataFacts(671, 82691, 1.66)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Writes measurements that are the predictions times a factor by variant."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write(factor) -> dict:
        calibration.save(NOMINAL)
        for name, roles in bench._asked(2):
            wanted = bench._predicted(roles, FACTS, NOMINAL)
            rates = {stage: [factor(name) * value] * 5 for stage, value in wanted.items()}
            found = {"facts": asdict(FACTS), "rates": rates}
            (tmp_path / f"{name}.json").write_text(json.dumps(found))
        return bench._judged(tmp_path, 2)["ratio"]

    return write


def test_predictions_that_are_all_off_by_the_same_factor_are_right_once_learnt(measured):
    found = measured(lambda name: 0.6)
    assert found["median error of rows/s"] < 1e-6
    assert found["rank correlation of the whole"] == pytest.approx(1.0)
    assert found["seconds of the choice / of the best measured"] == 1.0


def test_wrong_predictions_are_called_wrong(measured):
    random = {name: float(rng(7, name).uniform(0.2, 3)) for name in bench.VARIANTS}
    found = measured(lambda name: random.get(name.rsplit(" ", 1)[0], 1.0))
    assert found["median error of rows/s"] > 0.2
    assert found["rank correlation of the whole"] < 0.8


def test_the_variants_are_twelve_and_differ():
    plans = [json.dumps(roles, sort_keys=True) for roles in bench.VARIANTS.values()]
    assert len(set(plans)) == 12
    assert bench._spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert bench._spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
