"""Beams, exhaustive scores and log-probabilities of the SID decoder are one distribution, whatever decodes its codes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from nonet.attention import beams as beam_cache
from nonet.models.generation.beams import search_beams
from nonet.models.generation.exhaustive import score_items
from nonet.models.generation.logprob import log_prob, log_prob_from
from nonet.models.generation.trie import Trie
from nonet.models.spec import build_model
from nonet.random import rng
from nonet.rl.loss import compute_policy_loss
from nonet.types import Jagged, SampleBatch

CODES = (8, 7, 6, 3)
LENGTHS = (12, 0, 3, 30, 1)
KINDS = {
    "mlp": {},
    "attention": {"depth": "attention"},
    "hstu": {"block": "hstu", "length": 40},
    "both": {"block": "hstu", "length": 40, "depth": "attention"},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
TOLERANCE = 1e-5  # nats in float32: a shared prompt is summed apart from a beam's own codes


def model_of(options, dtype=torch.float32):
    model = build_model({"width": 16, "layers": 2, "heads": 2, **options}, CODES, {"user": 4}, 5).eval()
    generator = torch.Generator().manual_seed(5)
    for weight in model.depth.get_zero_weights():
        torch.nn.init.normal_(weight, std=0.5, generator=generator)
    return model.to(dtype)


def world(make_sids, dtype=torch.float32):
    """Make a catalogue of 150 items, and prompts that have walked over it."""
    sids, events, draw = make_sids(CODES, 150), sum(LENGTHS), rng(3, "walks")
    item = torch.from_numpy(draw.integers(0, 150, events))
    offsets = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    batch = SampleBatch(
        item=Jagged(item, offsets),
        sid=torch.from_numpy(sids)[item].long(),
        time=Jagged(torch.from_numpy(draw.integers(0, 10**6, events)).cumsum(0), offsets),
        event=Jagged(torch.zeros(events, dtype=torch.long), offsets),
        context={"user": torch.arange(len(LENGTHS))},
        loss_mask=Jagged(torch.ones(events, dtype=torch.bool), offsets),
        target=None,
        uid=[""] * len(LENGTHS),
    )
    rows = {"user": torch.from_numpy(draw.standard_normal((len(LENGTHS), 4))).to(dtype)}
    return sids, Trie.build(sids, CODES), batch, rows


@every_kind
def test_beams_scores_and_log_prob_agree(options, make_sids):
    model, (sids, trie, batch, rows) = model_of(options), world(make_sids)
    with torch.no_grad():
        cache = model.prefill(batch, rows)
        scores = score_items(model, cache, trie)
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(len(LENGTHS)), atol=1e-5, rtol=0)
    beams = search_beams(model, cache, trie, 9)
    assert bool(beams.valid.all())
    best = beams.logp.sum(-1)
    torch.testing.assert_close(best, scores.gather(1, beams.item), atol=TOLERANCE, rtol=0)
    again = log_prob(model, batch, rows, beams.sid, trie)  # with gradients: another way through attention
    assert again.requires_grad
    torch.testing.assert_close(again.detach(), beams.logp, atol=TOLERANCE, rtol=0)
    whole = search_beams(model, cache, trie, 150)  # as wide as the catalogue: every item, best first
    order = scores.sort(1, descending=True)
    torch.testing.assert_close(whole.logp.sum(-1), order.values, atol=TOLERANCE, rtol=0)
    every = log_prob_from(model, cache, torch.from_numpy(sids).expand(len(LENGTHS), -1, -1), trie).sum(-1)
    torch.testing.assert_close(every.detach(), scores, atol=TOLERANCE, rtol=0)


def test_scores_do_not_depend_on_how_many_prompts_are_taken_at_a_time(make_sids):
    model, (_, trie, batch, rows) = model_of(KINDS["attention"]), world(make_sids)
    with torch.no_grad():
        cache = model.prefill(batch, rows)
    whole = score_items(model, cache, trie)
    for budget in (1, 10_000, 40_000):
        torch.testing.assert_close(
            score_items(model, cache, trie, budget_bytes=budget), whole, atol=TOLERANCE, rtol=0
        )


def test_a_beam_search_reads_a_prompt_s_history_once_for_all_its_beams(make_sids, monkeypatch):
    model, (_, trie, batch, rows) = model_of(KINDS["attention"]), world(make_sids)
    read = []
    attend = beam_cache.uni_attention

    def counted(q, k, v, **options):
        read.append((len(q), len(k)))
        return attend(q, k, v, **options)

    monkeypatch.setattr(beam_cache, "uni_attention", counted)
    cache = model.prefill(batch, rows)
    search_beams(model, cache, trie, 9)
    tokens, prompts = sum(LENGTHS) + len(LENGTHS), len(LENGTHS)
    assert read == [(prompts, tokens), (prompts * 8, tokens), (prompts * 9, tokens), (prompts * 9, tokens)]


def test_gradients_of_the_policy_loss_are_those_of_finite_differences(make_sids):
    model, (_, trie, batch, rows) = (
        model_of(KINDS["attention"], torch.float64),
        world(make_sids, torch.float64),
    )
    with torch.no_grad():
        beams = search_beams(model, model.prefill(batch, rows), trie, 6)
    advantage = torch.from_numpy(rng(1, "advantage").standard_normal(beams.item.shape))
    reference = beams.logp - 0.1

    def loss():
        logp = log_prob(model, batch, rows, beams.sid, trie)
        return compute_policy_loss(logp, beams.logp, advantage, beams.valid, ref_UWL=reference, kl=0.1).loss

    loss().backward()
    parts = [
        model.depth.remember,
        model.depth.query[2],
        model.depth.key[0],
        model.depth.value[1],
        model.depth.merge[3],
    ]
    parts += [model.depth.sought[3][1], model.blocks[0].qkv]
    with torch.no_grad():
        for part in parts:
            gradient = part.weight.grad.flatten()
            place = int(gradient.abs().argmax())
            flat, values = part.weight.flatten(), []
            assert flat.data_ptr() == part.weight.data_ptr()
            for shift in (1e-6, -2e-6, 1e-6):  # up, down, back
                flat[place] += shift
                values.append(float(loss()))
            assert abs(float(gradient[place])) > 1e-6
            assert float(gradient[place]) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)


def test_an_unchanged_model_has_ratio_one_and_no_kl(make_sids):
    model, (_, trie, batch, rows) = model_of(KINDS["attention"]), world(make_sids)
    beams = search_beams(model, model.prefill(batch, rows), trie, 6)
    logp = log_prob(model, batch, rows, beams.sid, trie)
    with torch.no_grad():
        reference = log_prob(model, batch, rows, beams.sid, trie)
    found = compute_policy_loss(
        logp, beams.logp, torch.ones(beams.item.shape), beams.valid, ref_UWL=reference, kl=0.1
    )
    assert float(found.ratio / found.count) == pytest.approx(1.0, abs=1e-5)
    assert float(found.kl / found.count) == pytest.approx(0.0, abs=1e-7)  # exp(d) - d - 1 in float32
    assert int(found.clipped) == 0
    assert np.isfinite(float(found.loss.detach()))
