"""What a plan says a trainer keeps under ddp, beside what an engine keeps after a step: at 1, 2 and 4 ranks within a tenth."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nonet.controller.plan.memory import estimate_worker_memory
from nonet.controller.plan.resolved import derive_model_size, resolve_run
from nonet.controller.scenario import load_scenario
from nonet.controller.setup import make_run_setup
from nonet.models import build_model
from nonet.workers.engines import list_gradients, make_engine
from nonet.workers.runtime import Membership

QWEN3 = (
    "model={{use: hf, precision: {0}, config: {{model_type: qwen3, vocab_size: 512, hidden_size: 128, num_hidden_layers: 6, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32, intermediate_size: 512}}{1}}}"
)
MODELS = {
    "quickstart": [],
    "wide": ["model.width=256", "model.layers=6"],
    "hstu": ["model.block=hstu"],
    "adamw": ["stages.pretrain.optimizer={use: adamw}"],
    "qwen3 fp32": [QWEN3.format("fp32", "")],
    "qwen3 bf16": [QWEN3.format("bf16", "")],
    "qwen3 lora": [QWEN3.format("fp32", ", lora: {rank: 8, alpha: 16.0}")],
}


def stepped(scenario, ranks, monkeypatch):
    """Bytes that an engine keeps after a step, and those of the two largest copies that gradients were summed in."""
    size = derive_model_size(scenario)
    codes = (scenario.tokenizer.get_options().get("codes", 64),) * size.levels
    setup = make_run_setup(scenario)
    model = build_model(setup.model, codes, setup.get_feature_dims(), 0)
    learning = scenario.stages["pretrain"].optimizer
    engine = make_engine({"use": "ddp"}, model, Membership(0, ranks, n_trainers=ranks), learning)
    engine.restart()
    summed = []

    own = {gradient.untyped_storage().data_ptr() for gradient in list_gradients(engine)}

    def sum_bucket(flat, group=None, async_op=False):
        if flat.untyped_storage().data_ptr() not in own:
            summed.append(flat.nbytes)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.distributed, "all_reduce", sum_bucket)
    for gradient in list_gradients(engine):
        gradient.fill_(1e-3)
    engine.clip()
    engine.step(1e-3)
    kept = {id(tensor): tensor.nbytes for tensor in engine.device_tensors()}
    return sum(kept.values()), sum(sorted(summed)[-2:])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_planned_bytes_are_within_a_tenth_of_what_a_rank_keeps(name, ranks, monkeypatch):
    if name.startswith("qwen3"):
        pytest.importorskip("transformers")
    scenario, _ = load_scenario("quickstart", MODELS[name])
    planned = estimate_worker_memory(resolve_run(scenario), "pretrain", ("trainer",), ranks, 0.0)
    kept, buffer = stepped(scenario, ranks, monkeypatch)
    fixed = sum(
        value for part, value in planned.fixed.items() if part in ("weights", "gradients", "optimizer")
    )
    assert fixed == pytest.approx(kept, rel=0.1)
    assert planned.working.get("buffer", 0.0) == pytest.approx(buffer, rel=0.1)
    assert fixed + planned.working.get("buffer", 0.0) == pytest.approx(kept + buffer, rel=0.1)
