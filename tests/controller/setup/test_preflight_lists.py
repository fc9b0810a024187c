"""What is refused because lists could not be what the scenario asks of them."""

import pytest

from nonet.bench.runs.feed import write_feed
from nonet.controller.scenario.document.library import find_scenario
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.preflight import check
from nonet.controller.setup.run_files import make_data_setup
from nonet.errors import ConfigError


def checked(folder, *changes):
    write_feed(folder)
    check(*load_scenario(folder / "feed.yaml", list(changes)))


@pytest.mark.parametrize("metric", ["recall@10", "coverage@10"])
def test_a_beam_narrower_than_a_metric_looks_is_refused(tmp_path, metric):
    with pytest.raises(ConfigError, match=f"evaluate.width: a beam of 5 .* {metric} .* to 10 or more"):
        checked(tmp_path, f"evaluate={{metrics: [coverage, {metric}], width: 5}}")
    checked(tmp_path, f"evaluate={{metrics: [coverage, {metric}], width: 10}}")


def test_rl_without_a_prompt_that_a_list_could_answer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"events held out for RL return .* set data\.repeats: allow"):
        checked(tmp_path, "data.repeats=mask", "data.where=user_id in [100, 102, 104]")
    checked(tmp_path, "data.where=user_id in [100, 102, 104]")


def test_repeats_are_allow_or_mask(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.repeats"):
        checked(tmp_path, "data.repeats=never")


def test_a_click_model_makes_no_lists_and_takes_no_word_on_repeats():
    assert make_data_setup(*load_scenario(find_scenario("ctr"))).options.repeats == "mask"
    with pytest.raises(ConfigError, match=r"data\.repeats: deepfm recommends no lists"):
        check(*load_scenario(find_scenario("ctr"), ["data.repeats=allow"]))
