"""The verbs that the runs of a scenario have, as the kinds of its parts declare them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from likes_world import SCENARIO as LIKES
from tests_ring import SCENARIO as RING

from nonet.controller.scenario import check_supported, find_verb_limit, load_scenario
from nonet.controller.scenario.verb_limits import list_missing_verbs
from nonet.errors import ConfigError
from nonet.verbs import STEERING_VERBS, TRAINING_VERBS, VERBS, SupportedVerbs

MODEL = """
from nonet.plug import ModelSize, ModelSpec

def build(options, codes, features, seed):
    raise NotImplementedError

class Own(ModelSpec):
    build = staticmethod(build)
    makes_lists = False

    def size(self, options, around):
        return ModelSize(1, 1, 1, 1, 1, 1, 1, 1, 4)

SPEC = Own()
"""


def load(folder: Path, text: str, **changes: object):
    (folder / "own.py").write_text(MODEL)
    (folder / "rewards").mkdir(exist_ok=True)
    (folder / "s.yaml").write_text(yaml.safe_dump(yaml.safe_load(text) | changes))
    return load_scenario(folder / "s.yaml")[0]


def test_a_scenario_of_lists_with_rewards_has_every_verb(tmp_path):
    scenario = load(tmp_path, RING)
    assert [verb for verb in VERBS if find_verb_limit(scenario, verb)] == []
    assert list_missing_verbs(scenario) == {}


def test_rewards_are_changed_only_where_a_stage_has_some(tmp_path):
    stages = {"pretrain": yaml.safe_load(RING)["stages"]["pretrain"]}
    scenario = load(tmp_path, RING, stages=stages)
    assert {verb for verb in VERBS if find_verb_limit(scenario, verb)} == set(STEERING_VERBS)
    with pytest.raises(
        ConfigError, match=r"^attach: ring has stages\.pretrain, which has no rewards .* add an RL"
    ):
        check_supported(scenario, "attach", "ring")


def test_a_tokenizer_without_codebooks_only_withdraws_items(tmp_path):
    scenario = load(tmp_path, RING, tokenizer={"use": "file", "path": "sids.parquet"})
    assert [verb for verb in VERBS if find_verb_limit(scenario, verb)] == ["items add"]


def test_a_refusal_is_one_line_with_the_part_and_the_next_step(tmp_path):
    scenario = load(tmp_path, LIKES)
    with pytest.raises(
        ConfigError, match=r"^/recommend: likes-1 has model\.use: deepfm, which .*; "
    ) as error:
        check_supported(scenario, "/recommend", "likes-1")
    assert "\n" not in str(error.value)


def test_a_verb_that_a_model_of_your_own_does_not_declare_is_refused_by_its_name(tmp_path):
    scenario = load(tmp_path, RING, model={"use": "own.py:SPEC"})
    assert not any(find_verb_limit(scenario, verb) for verb in TRAINING_VERBS)
    with pytest.raises(
        ConfigError, match=r"^export: ring has model\.use: own\.py:SPEC, which does not declare 'export'"
    ):
        check_supported(scenario, "export", "ring")


def test_a_reason_stands_before_a_list_of_verbs():
    supported = SupportedVerbs(("run",), {"export": "has no weights; train it"})
    assert supported.find_limit("run") is None
    assert supported.find_limit("export") == "has no weights; train it"
    assert "does not declare 'serve'" in str(supported.find_limit("serve"))
