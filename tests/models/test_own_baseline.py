"""Baselines of the user's own: found by file and class, checked by their signature, rehearsed on a handful of prompts."""

import re

import numpy as np
import pyarrow as pa
import pytest

from nonet.controller.scenario.scenario import make_scenario
from nonet.controller.setup.worker_setup import make_baseline_options
from nonet.errors import ConfigError, DataError
from nonet.models.baselines import rehearse
from nonet.models.baselines.kinds.base import BASELINES, make_baseline
from nonet.plugins import PluginFiles
from nonet.samples.sequences.sequences import build_sequences

OWN = """
import numpy as np

class Nearest:
    def __init__(self, n_items, *, seed, neighbours: int = 3):
        self.n_items, self.seed, self.neighbours = n_items, seed, neighbours

    def fit(self, seq, splits=(0,)):
        return self

    def scores(self, seq, users, positions):
        return np.zeros((len(users), self.n_items), np.float32)

class Half:
    def fit(self, seq): ...
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path


def scenario(folder, *baselines):
    body = {
        "name": "a",
        "data": {"interactions": "i.parquet"},
        "stages": {"pretrain": {"epochs": 1}},
        "evaluate": {"baselines": list(baselines)},
    }
    return make_scenario(body, "s", PluginFiles(str(folder)))


def test_a_class_of_a_file_is_a_baseline_whose_arguments_are_keys(folder):
    own = {"use": "mine.py:Nearest", "neighbours": 7}
    chosen = make_baseline_options(
        scenario(folder, "popularity", own, {"use": "sasrec", "name": "slow", "trials": 2})
    )
    assert list(chosen) == ["popularity", "Nearest", "slow"]
    assert chosen["Nearest"] == {"use": f"{folder / 'mine.py'}:Nearest", "neighbours": 7}
    assert chosen["slow"]["trials"] == 2
    assert chosen["slow"]["epochs"] > 1
    made = make_baseline(chosen["Nearest"], 5, seed=9, history=8)
    assert (made.n_items, made.seed, made.neighbours) == (5, 9, 7)


def test_by_default_a_model_says_its_baselines(folder):
    body = {"name": "a", "data": {"interactions": "i"}, "stages": {"pretrain": {"epochs": 1}}}
    assert list(make_baseline_options(make_scenario(body))) == [
        "popularity",
        "transition_counter",
        "attribute_counter",
    ]


@pytest.mark.parametrize(
    ("baselines", "said"),
    [
        (["sasrek"], "evaluate.baselines.0: use: baseline 'sasrek' (did you mean 'sasrec'?)"),
        ([{"use": "sasrec", "epoch": 3}], "evaluate.baselines.0.epoch: unknown key (did you mean 'epochs'?)"),
        ([{"use": "sasrec", "width": 15}], "evaluate.baselines.0: width 15 must be heads (2) times an even"),
        (["sasrec", "sasrec"], "2 are named 'sasrec'; give each a different name:"),
        (["mine.py:Half"], "mine.py): class Half has no scores; see docs/how-to/baselines.md"),
        (["mine.py:Farthest"], "there is no 'Farthest' in mine.py"),
        ([{"use": "mine.py:Nearest", "near": 1}], "evaluate.baselines.0.near: unknown key"),
    ],
)
def test_what_is_wrong_with_a_baseline_is_one_line(folder, baselines, said):
    with pytest.raises(ConfigError) as error:
        scenario(folder, *baselines)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_comes_with_nonet_is_found_by_name():
    assert BASELINES.list_shipped() == [
        "attribute_counter",
        "ease",
        "ials",
        "item_knn",
        "popularity",
        "recent_popularity",
        "sasrec",
        "transition_counter",
        "v_sknn",
    ]
    assert [name for name in BASELINES.list_shipped() if BASELINES.get(name).quick] == [
        "popularity",
        "transition_counter",
    ]


class Answers:
    """A baseline that answers with what it is given: a function of (prompts, items)."""

    def __init__(self, answer, fitted=True):
        self.answer, self.fitted, self.users = answer, fitted, None

    def fit(self, seq, splits=(0,)):
        self.users = len(seq)
        return self if self.fitted else None

    def scores(self, seq, users, positions):
        assert len(seq) == self.users
        assert (positions < seq.lengths[users]).all()
        return self.answer(len(users), 6)


def sequences(users=300):
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(users), 4),
            "item_id": np.arange(4 * users) % 6,
            "timestamp": np.arange(4 * users),
        }
    )
    return build_sequences(log, None, split={"test": 1, "valid": 1})[0]


def test_a_rehearsal_takes_few_users_and_floats_of_the_right_shape():
    good = Answers(lambda prompts, items: np.full((prompts, items), -np.inf, np.float64))
    rehearse("mine", lambda: good, sequences(), 6)
    assert good.users == 200


def fails(prompts, items):
    raise KeyError("no such item")


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        (
            Answers(lambda p, i: np.zeros((i, p), np.float32)),
            "scores are float32 [6, 4]; wanted float32 [4, 6]",
        ),
        (Answers(lambda p, i: np.zeros((p, i), np.int64)), "scores are int64 [4, 6]; wanted float32 [4, 6]"),
        (Answers(lambda p, i: [[0.0] * i] * p), "scores are a list; wanted float32 [4, 6]"),
        (
            Answers(lambda p, i: np.full((p, i), np.nan)),
            "scores of 4 of 4 prompts are NaN, the first is row 0",
        ),
        (Answers(fails), "on the first 200 users it failed: KeyError: 'no such item'"),
        (Answers(fails, fitted=False), "fit returned None; it must return the baseline itself"),
    ],
)
def test_an_answer_that_nobody_can_rank_is_one_line(baseline, said):
    with pytest.raises(DataError, match=re.escape(said)) as error:
        rehearse("mine", lambda: baseline, sequences(), 6)
    assert str(error.value).startswith("baseline 'mine': ")
    assert "\n" not in str(error.value)
