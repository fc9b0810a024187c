"""What a scenario may say of a Hugging Face backbone, and what is refused before anything starts."""

import sys

import pytest

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from backbones import QWEN3, folder_of

from nonet.controller.scenario import check_scenario, load_scenario, make_scenario
from nonet.errors import ConfigError
from nonet.models import ModelContext
from nonet.models.hf.spec import SPEC

PATH_OF_WORDS = "films a user liked : {history} next :"


def scenario(model, stage=None, **data):
    return make_scenario(
        {
            "name": "words",
            "data": {"interactions": "i.parquet", "items": "t.parquet", "history": 20, **data},
            "model": {"use": "hf", **model},
            "stages": {"pretrain": {"epochs": 1, **(stage or {})}},
        }
    )


def _checked(made):
    check_scenario(made)
    SPEC.check_files(made)


def refused(model, stage=None, **data):
    made = scenario(model, stage, **data)
    with pytest.raises(ConfigError) as said:
        _checked(made)
    assert "\n" not in str(said.value)
    return str(said.value)


def test_a_backbone_of_a_config_or_a_folder_runs(tmp_path):
    path = folder_of(tmp_path / "base")
    align = {"use": "align", "items": 8}
    for model, stage in (
        ({"config": QWEN3}, {}),
        ({"path": path, "prompt": PATH_OF_WORDS, "lora": {"rank": 2}}, align),
    ):
        made = scenario(model, stage)
        _checked(made)
    assert (
        made.stages["pretrain"].kind.compute_lengths(made.stages["pretrain"], 10, 100)["align"]["items"] == 8
    )


def test_what_a_run_cannot_do_is_said_before_it_starts(tmp_path, monkeypatch):
    assert "model.path: what://models/Qwen3-0.6B is not an address that Arrow opens" in refused(
        {"path": "what://models/Qwen3-0.6B"}
    )
    assert "ahead: 3 with model.use: hf" in refused({"config": QWEN3}, {"ahead": 3})
    assert "stages.pretrain needs a tokenizer" in refused({"config": QWEN3}, {"use": "align"})
    short = {**QWEN3, "max_position_embeddings": 64}
    assert "max_position_embeddings is 64, and data.history: 20 makes sequences of 85" in refused(
        {"config": short}
    )
    assert "lower data.history to 14 or fewer" in refused({"config": short})
    path = folder_of(tmp_path / "base", extra_words=("<|sid_1_0|>",))
    assert "already contains <|sid_1_0|>" in refused({"path": path})
    assert "no layer 'q_prj'" in refused({"config": QWEN3, "lora": {"targets": ["q_prj"]}})
    assert "num_attention_heads 4 is not a multiple of num_key_value_heads 3" in refused(
        {"config": {**QWEN3, "num_attention_heads": 4, "num_key_value_heads": 3}}
    )
    odd = {"model_type": "gpt2", "n_embd": 30, "n_head": 4, "n_layer": 2}
    assert "gpt2 cannot be built from its config: `embed_dim` must be divisible by num_heads" in refused(
        {"config": odd}
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("nonet.models.hf.config.find_spec", lambda name: None)
    assert "pip install 'nonet[hf]'" in refused({"config": QWEN3})


def test_a_folder_is_beside_the_scenario(tmp_path):
    folder_of(tmp_path / "base")
    (tmp_path / "words.yaml").write_text(
        "name: words\ndata: {interactions: i.parquet}\nmodel: {use: hf, path: base}\nstages: {pretrain: {epochs: 1}}\n"
    )
    made, _ = load_scenario(tmp_path / "words.yaml")
    assert made.model.get_options()["path"] == str(tmp_path / "base")
    assert scenario({"path": "nowhere"}).model.get_options()["path"] == "nowhere"


def test_only_a_model_of_words_is_aligned():
    made = make_scenario(
        {
            "name": "words",
            "data": {"interactions": "i.parquet"},
            "stages": {"align": {"use": "align", "epochs": 1}},
        }
    )
    with pytest.raises(ConfigError, match=r"use: align with model\.use: sid_decoder"):
        check_scenario(made)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "give one of path"),
        ({"path": "a", "config": QWEN3}, "give one of path"),
        ({"config": QWEN3, "prompt": "films"}, "must contain {history} once"),
        ({"config": QWEN3, "atention": "uni"}, "attention"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_as_they_are_read(model, said):
    with pytest.raises(ConfigError, match=said):
        scenario(model)


def test_histories_that_fit_are_the_longest_that_do():
    """14 events and the one that leads them in, of 4 codes, and START: 61 of 64 positions."""
    short = {**QWEN3, "max_position_embeddings": 64}
    SPEC.check(scenario({"config": short}, history=14))
    assert SPEC.size({"config": short}, ModelContext(4, 8, 14)).layers == 2
