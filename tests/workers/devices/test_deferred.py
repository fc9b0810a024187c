"""Models that are built without memory get the first weights of a whole build, a few at a time."""

from __future__ import annotations

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
