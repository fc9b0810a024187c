"""Models that are built without memory get the first weights of a whole build, a few at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from nonet.controller.plan.resolved import derive_model_size
from nonet.controller.scenario import load_scenario
from nonet.controller.setup import make_run_setup
from nonet.models import build_model
from nonet.workers.devices import record_build


def make_build(*changes):
    """Return the function that builds a scenario's model."""
    scenario, _ = load_scenario("quickstart", list(changes))
    setup, codes = make_run_setup(scenario), (64,) * derive_model_size(scenario).levels
    return lambda: build_model(setup.model, codes, setup.get_feature_dims(), 5)


@pytest.mark.parametrize("change", ["model.layers=3", "model.block=hstu", "model.depth=attention"])
def test_a_recorded_build_has_the_bits_of_a_whole_one(change):
    build = make_build(change)
    whole, before = build(), torch.get_rng_state()
    recorded = record_build(build)
    assert recorded is not None
    values = {name: value.clone() for name, value in recorded.replay()}
    assert torch.equal(torch.get_rng_state(), before)
    assert set(values) == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert torch.equal(values[name], parameter), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(dict(recorded.model.named_buffers())[name], buffer), name


def test_a_model_that_reads_its_own_weights_must_be_built_whole():
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 3))
            self.spread = float(self.weight.detach().std())

    class Keeps(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.steps = torch.arange(3)

    assert record_build(Reads) is None
    assert record_build(Keeps) is None
    assert record_build(lambda: torch.nn.Linear(3, 3)) is not None


def test_a_backbone_has_the_bits_of_a_whole_build_whether_it_is_drawn_or_read(tmp_path):
    """Its weights and the codes' are drawn from the same seed; frozen ones and the choices for passes are equal too."""
    pytest.importorskip("transformers")
    from nonet.models.hf.language_model import build_causal_lm

    config = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
    drawn = {"use": "hf", "config": config}
    build_causal_lm(drawn, 3).save_pretrained(tmp_path)
    lora = {"lora": {"rank": 2, "alpha": 4.0}}
    for options in (drawn, drawn | lora, {"use": "hf", "path": str(tmp_path), "precision": "bf16"}):
        build = partial(build_model, options, (8, 8), {"item": 4}, 5)
        whole, recorded = build(), record_build(build)
        assert recorded is not None
        values = dict(recorded.replay())
        weights = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
        assert values.keys() == weights.keys()
        for name, weight in weights.items():
            assert values[name].dtype == weight.dtype
            assert torch.equal(values[name], weight), name
        assert (recorded.model.caches, recorded.model.backbone.packs) == (whole.caches, whole.backbone.packs)


def test_a_folder_whose_weights_have_other_names_is_read_by_transformers(tmp_path):
    """The weights of experts are merged when transformers reads them."""
    pytest.importorskip("transformers")
    from nonet.models.hf.language_model import build_causal_lm

    config = {"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 2}
    build_causal_lm({"use": "hf", "config": config}, 3).save_pretrained(tmp_path)
    assert record_build(lambda: build_model({"use": "hf", "path": str(tmp_path)}, (8, 8), {}, 5)) is None


def test_a_weight_that_is_drawn_orthogonal_has_the_bits_of_a_whole_build():
    """torch.nn.init does nothing for a tensor that says that it is on the meta device."""

    def build(rows=4):
        torch.manual_seed(3)
        layer = torch.nn.Linear(4, rows, bias=False)
        torch.nn.init.orthogonal_(layer.weight)
        return layer

    recorded = record_build(build)
    assert recorded is not None
    assert torch.equal(dict(recorded.replay())["weight"], build().weight)
    assert record_build(lambda: build(rows=2)) is None  # It transposes a tensor in place.


def test_a_seed_that_is_set_twice_draws_the_same_numbers_twice():
    def build():
        layers = []
        for _ in range(2):
            torch.manual_seed(3)
            layers.append(torch.nn.Linear(4, 4, bias=False))
        return torch.nn.Sequential(*layers)

    recorded = record_build(build)
    assert recorded is not None
    values = dict(recorded.replay())
    assert torch.equal(values["0.weight"], values["1.weight"])
