"""Whether keys and values of histories are kept is judged in the backbone's own precision, and said where they are not."""

from __future__ import annotations

import logging

import pytest
import torch
from backbones import QWEN3, recommender

from nonet.models.hf.model import HfRecommender
from nonet.workers.engines._blocks import prepare


def rounded(monkeypatch, units):
    """Let steps from a cache differ by so many units of the precision's epsilon, as rounding through many layers does."""
    step = HfRecommender.step

    def differing(model, cache, codes, level):
        answer = step(model, cache, codes, level)
        if cache.kv is None:
            return answer
        signs = 1.0 - 2.0 * (torch.arange(answer.shape[-1]) % 2)
        return answer + units * torch.finfo(model.backbone.dtype).eps * answer.abs().mean() * signs

    monkeypatch.setattr(HfRecommender, "step", differing)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rounding_in_reduced_precision_keeps_the_cache(monkeypatch, precision):
    rounded(monkeypatch, 4.0)
    model = recommender(precision=precision)
    assert model.caches
    assert model.no_cache is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_cache_that_says_something_else_is_dropped_and_that_is_reported(monkeypatch, caplog, precision):
    epsilon = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    rounded(monkeypatch, max(12.0, 0.01 / torch.finfo(epsilon).eps))
    with caplog.at_level(logging.WARNING):
        model = recommender(precision=precision)
    assert not model.caches
    assert "steps with the key-value cache differ by" in model.no_cache
    assert "the model computes the whole history again for each code of a beam" in caplog.text


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_backbone_that_cannot_use_one_is_seen_in_every_precision(precision):
    """MPT biases attention by distances that a prefix behind a history does not have."""
    config = {"model_type": "mpt", "d_model": 64, "n_layers": 4, "n_heads": 4, "initializer_range": 0.2}
    model = recommender(config, precision=precision)
    assert not model.caches
    assert "differ by" in model.no_cache


@pytest.mark.parametrize("layers", [8, 16])
def test_deep_backbones_keep_theirs(layers):
    config = QWEN3 | {
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "head_dim": 16,
        "initializer_range": 0.02,
    }
    assert recommender(config, precision="bf16").caches


def test_blocks_that_are_recomputed_store_their_keys_once():
    """The gradients of steps behind a kept history are those of blocks that keep their activations."""
    gradients = []
    for recompute in (False, True):
        backbone = recommender().backbone
        prepare(backbone.model, {"recompute": recompute})
        generator = torch.Generator().manual_seed(1)
        history, new = (torch.randn(2, n, backbone.width, generator=generator) for n in (5, 3))
        _, kv = backbone.prefill(history.requires_grad_())
        visible = torch.ones(2, 3, 8, dtype=torch.bool).tril(5)
        position = torch.arange(5, 8).expand(2, 3)
        states, _ = backbone.compute_next_states(new, position, visible, kv)
        states.square().sum().backward()
        gradients.append([history.grad, *(p.grad for p in backbone.parameters() if p.grad is not None)])
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)
