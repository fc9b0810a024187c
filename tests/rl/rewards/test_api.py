"""Attaching a reward: functions, classes, files, and one readable line for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch

from nonet.errors import ConfigError, DataError
from nonet.rl.rewards.api import (
    SHIPPED,
    Reward,
    as_reward,
    check_options,
    find_reward,
    load_reward,
    reward,
    score_checked,
)
from nonet.rl.rewards.checks import set_up
from nonet.rl.rewards.shipped import Cooccurrence, hit, novelty


@reward
def cheap(price, valid, *, ceiling: float = 50.0):
    return (price <= ceiling) & valid


class Scaled(Reward):
    columns = ("price",)

    def __init__(self, factor: float, shift: float = 0.0):
        self.factor, self.shift = factor, shift

    def score(self, r):
        return r["price"] * self.factor + self.shift


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_function_reads_columns_and_fields_by_name(make_rollouts):
    r = make_rollouts(columns={"price": np.array([[10.0, 60.0], [40.0, 45.0]])})
    scored = as_reward(cheap, {"ceiling": 42})
    assert list(scored.columns) == ["price"]
    assert score_checked(scored, "cheap", r).tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert cheap(np.array([3.0, 99.0]), np.array([True, True])).tolist() == [True, False]  # still a function


def test_a_class_gets_its_options_and_reads_the_rollouts(make_rollouts):
    r = make_rollouts(columns={"price": np.array([[1.0, 2.0], [3.0, 4.0]])})
    scored = as_reward(Scaled, {"factor": 2.0})
    scored.setup()
    assert scored.device == "cpu"
    assert score_checked(scored, "scaled", r).tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert as_reward(scored) is scored


def test_writing_a_reward_needs_no_torch():
    check = "import sys, nonet.rl.rewards.shipped, nonet.rl.rollouts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (cheap, {"cieling": 3}, "reward 'margin' has no option 'cieling'; did you mean 'ceiling'?"),
        (cheap, {"price": 3}, "reward 'margin' has no option 'price'; there are: ceiling"),
        (hit, {"k": 3}, "reward 'margin' has no option 'k'; it takes none"),
        (Scaled, {}, "reward 'margin' needs the option 'factor'"),
        (Scaled, {"factor": 1, "shfit": 2}, "no option 'shfit'; did you mean 'shift' (of factor, shift)?"),
        (
            novelty,
            {"half_life": 0},
            "reward 'margin': the option half_life is 0; input should be greater than 0.",
        ),
        (novelty, {"half_life": "x"}, "the option half_life is 'x'; input should be a valid number"),
        (Cooccurrence, {"last": 0}, "the option last is 0; input should be greater than or equal to 1"),
        (dict, {}, "class dict must inherit from nonet.Reward"),
        (Reward, {}, "must inherit from nonet.Reward and define score"),
        (7, {}, "7 is neither a function nor a nonet.Reward"),
    ],
)
def test_options_are_checked_against_the_signature(target, options, message):
    with pytest.raises(ConfigError) as error:
        check_options(target, options, name="margin")
    assert message in one_line(error)


def test_a_signature_that_cannot_be_resolved_is_refused():
    with pytest.raises(ConfigError, match="'ceiling' has a default, so is it a column or an option"):

        @reward
        def unclear(price, ceiling=50):
            return price

    with pytest.raises(ConfigError, match=r"\*args and \*\*kwargs"):
        as_reward(lambda *columns: 0)
    with pytest.raises(ConfigError, match=r"inherit from nonet\.Reward"):
        reward(Scaled)


def test_a_class_that_cannot_be_made_is_a_readable_error():
    class Broken(Reward):
        def __init__(self, path: str):
            open(path).close()

        def score(self, r):
            return r.valid

    with pytest.raises(ConfigError) as error:
        as_reward(Broken, {"path": "/nowhere/model"}, name="ctr")
    assert "reward 'ctr': Broken() failed: FileNotFoundError" in one_line(error)


# --- use: ---------------------------------------------------------------------------------------------------

TWO = """
from dataclasses import dataclass
from nonet.rl.rewards.api import Reward, reward
from nonet.rl.rewards.shipped import rank

@dataclass
class Helper:
    x: int = 1

@reward
def first(item_id, *, by: float = 1.0):
    return item_id * by

class Second(Reward):
    def score(self, r):
        return r.valid * Helper().x
"""


def test_shipped_names_files_and_modules_are_found(tmp_path, make_rollouts):
    (tmp_path / "mine.py").write_text(TWO)
    (tmp_path / "only.py").write_text(TWO[: TWO.index("class Second")])
    r = make_rollouts()
    for use, options, expected in [
        ("hit", {}, [[0, 1], [0, 0]]),
        ("mine.py:first", {"by": 2.0}, [[20, 22], [24, 26]]),
        ("mine.py:Second", {}, [[1, 1], [1, 1]]),
        ("only.py", {}, [[10, 11], [12, 13]]),
        ("nonet.rl.rewards.shipped:hit", {}, [[0, 1], [0, 0]]),
        (hit, {}, [[0, 1], [0, 0]]),
    ]:
        assert score_checked(load_reward(use, tmp_path, options), "x", r).tolist() == expected


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TWO)
    before = find_reward("mine.py:first", tmp_path)
    assert find_reward("mine.py:first", tmp_path) is before
    path.write_text(TWO.replace("by: float = 1.0", "times: float = 1.0"))
    with pytest.raises(ConfigError, match="did you mean 'times'"):
        load_reward("mine.py:first", tmp_path, {"time": 2.0})


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            "hitt",
            f"no reward 'hitt' is shipped; did you mean 'hit' (of {', '.join(SHIPPED)})",
        ),
        (
            "unheard",
            f"no reward 'unheard' is shipped; there are: {', '.join(SHIPPED)}",
        ),
        ("actor://pricing", "wanted actor://namespace/name"),
        (
            "ftp://host/score",
            "no reward has the scheme ftp://; supported are http://, https:// and actor://",
        ),
        ("missing.py", "(missing.py): there is no file"),
        ("mine.py", "(mine.py): it defines 2 rewards (first, Second). Say which: file.py:first"),
        ("mine.py:third", "it has no 'third'; its rewards are: first, Second"),
        ("empty.py", "(empty.py): it defines no reward. Mark a function with @nonet.reward"),
        (
            "broken.py",
            "(broken.py): the import failed: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        ("syntax.py", "(syntax.py): the import failed: SyntaxError"),
        ("exits.py", "(exits.py): the import failed: SystemExit: 3"),
        ("nowhere_at_all.rewards:X", "(nowhere_at_all.rewards:X): the import failed: ModuleNotFoundError"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named_with_its_file_and_cause(tmp_path, use, message):
    (tmp_path / "mine.py").write_text(TWO)
    (tmp_path / "empty.py").write_text("from nonet.rl.rewards.shipped import hit\n")
    (tmp_path / "broken.py").write_text("import nowhere_at_all\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError) as error:
        load_reward(use, tmp_path, {}, name="margin")
    assert message in one_line(error)
    assert "reward 'margin'" in one_line(error)


# --- what comes back ----------------------------------------------------------------------------------------


class Fixed(Reward):
    def __init__(self, answer):
        self.answer = answer

    def score(self, r):
        return self.answer


NUMBERS = [[1.0, 0.0], [2.0, -3.0]]


@pytest.mark.parametrize(
    "answer",
    [
        np.array(NUMBERS),
        np.array(NUMBERS, np.int8),
        NUMBERS,
        torch.tensor(NUMBERS),
        torch.tensor(NUMBERS, dtype=torch.bfloat16, requires_grad=True),
        pa.array(NUMBERS),
        pa.chunked_array([NUMBERS[:1], NUMBERS[1:]]),
        pa.FixedSizeListArray.from_arrays(pa.array([1.0, 0.0, 2.0, -3.0]), 2),
    ],
)
def test_numpy_torch_arrow_and_lists_are_accepted(answer, make_rollouts):
    scores = score_checked(Fixed(answer), "x", make_rollouts())
    assert scores.tolist() == NUMBERS
    assert scores.dtype == np.float32


def test_booleans_become_zero_and_one(make_rollouts):
    assert score_checked(Fixed(np.eye(2, dtype=bool)), "x", make_rollouts()).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("answer", "came_back"),
    [
        (np.ones((2, 1)), "numpy.ndarray of shape [2, 1] float64"),
        (np.ones(2), "numpy.ndarray of shape [2] float64"),
        (torch.ones(2, 2, 1), "torch.Tensor of shape [2, 2, 1] float32"),
        (3.0, "float of shape [] float64"),
        (None, "None"),
        (np.array([["a", "b"], ["c", "d"]]), "numpy.ndarray of shape [2, 2] <U1"),
        (pa.array([[1.0], [2.0, 3.0]]), "pyarrow.ListArray"),
        ([[1.0], [2.0, 3.0]], "list"),
    ],
)
def test_a_wrong_shape_or_type_is_refused_and_nothing_is_broadcast(answer, came_back, make_rollouts):
    with pytest.raises(DataError) as error:
        score_checked(Fixed(answer), "margin", make_rollouts())
    text = one_line(error)
    assert text.startswith(f"reward 'margin' returned {came_back}")
    assert "for users 501, 502" in text
    assert "shape [2, 2]" in text


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ([[1, 2], [3, np.nan]], "nan for user 502, item 13; 1 of 2 users"),
        ([[np.inf, 2], [3, np.nan]], "inf for user 501, item 10; 2 of 2 users"),
        ([[1, 2], [1e300, 4]], "inf for user 502, item 12"),
        (pa.array([[1.0, None], [3.0, 4.0]]), "nan for user 501, item 11"),
    ],
)
def test_a_score_that_is_not_finite_is_refused_with_its_user_and_item(answer, shown, make_rollouts):
    with pytest.raises(DataError) as error:
        score_checked(Fixed(answer), "margin", make_rollouts())
    assert f"reward 'margin' returned {shown}" in one_line(error)


def test_what_stands_where_no_beam_is_does_not_matter(make_rollouts):
    r = make_rollouts(valid=np.array([[True, False], [True, True]]))
    assert score_checked(Fixed([[1, np.nan], [3, 4]]), "x", r).tolist() == [[1, 0], [3, 4]]


def test_a_reward_that_raises_is_named_with_users_cause_and_place(make_rollouts):
    @reward
    def divides(step):
        return json.loads("{\n 'a'}")

    with pytest.raises(DataError) as error:
        score_checked(as_reward(divides), "margin", make_rollouts())
    text = one_line(error)
    assert text.startswith(
        "reward 'margin' failed for users 501, 502: JSONDecodeError: Expecting property name"
    )
    assert "(test_api.py:" in text
    assert isinstance(error.value.__cause__, json.JSONDecodeError)


def test_a_column_that_was_not_joined_is_named_with_a_suggestion(make_rollouts):
    r = make_rollouts(columns={"prise": np.ones((2, 2))})
    with pytest.raises(DataError) as error:
        score_checked(as_reward(cheap), "margin", r)
    assert "reward 'margin': there is no column 'price'; did you mean 'prise'" in one_line(error)


def test_only_the_first_users_are_named(make_rollouts):
    r = make_rollouts(users=9)
    with pytest.raises(DataError, match=r"for users 501, 502, 503, \.\.\.; wanted numbers of shape \[9, 2\]"):
        score_checked(Fixed(np.ones(3)), "margin", r)


def test_a_setup_that_raises_names_reward_cause_and_line():
    class Late(Reward):
        def setup(self):
            raise FileNotFoundError("no model file")

        def score(self, r):
            return r.item

    with pytest.raises(
        DataError,
        match=r"reward 'ctr' failed in setup: FileNotFoundError: no model file \(test_api.py:\d+\)",
    ):
        set_up(Late(), "ctr")
