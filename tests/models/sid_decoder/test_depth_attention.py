"""Depth attention: teacher-forced it leaks nothing, stepped it answers alike, and beams share their prompt's history."""

import dataclasses

import pytest
import torch
from sid_batches import CLOSE, CODES, KINDS, LENGTHS, batch_of, changed_from, model_of, stirred

from nonet.errors import DataError
from nonet.models.sid_decoder import target_pages as pages
from nonet.models.sid_decoder.beam_cache import DecoderCache
from nonet.models.sid_decoder.depth import DepthDecoder
from nonet.types import Jagged

every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


@every_kind
def test_logits_of_earlier_targets_keep_their_bits_when_later_events_change(options):
    """Teacher-forced, all targets of a sequence share one call: what is asked of an event must not see those behind it."""
    model = stirred(**options)
    batch, rows = batch_of((9,))
    batch.loss_mask.values[:] = True
    before = model(batch, rows)
    for changed in range(1, 9):
        after = model(*changed_from(batch, rows, changed))
        for level in range(model.levels):
            # Target `changed` itself has other codes: its first level is asked of unchanged events alone.
            same = changed + (level == 0)
            assert torch.equal(after[level][:same], before[level][:same])
            if changed < 8:
                assert not torch.allclose(
                    after[level][changed + 1 :], before[level][changed + 1 :], atol=1e-3
                )


@pytest.mark.parametrize("depth", ["mlp", "attention"])
def test_a_target_asked_from_farther_is_deaf_to_what_lies_between(depth):
    model = stirred(depth=depth)
    batch, rows = batch_of((9,))
    batch.loss_mask.values[:] = True

    def nats(batch, rows, distance):
        position_MA = torch.stack([model.target_positions(batch, d) for d in (1, 2, 3)], 1)
        sid_ML, states = model.targets(batch), model.states(batch, rows)
        every = [torch.arange(len(sid_ML))] * model.levels
        return [
            x[-1, distance - 1]
            for x in model.teacher_forced_logits(batch, states, position_MA, sid_ML, every)
        ]

    between = dataclasses.replace(batch, sid=batch.sid.clone())
    between.sid[6:8] = (between.sid[6:8] + 1) % torch.tensor(CODES)
    for distance in (1, 2, 3):
        same = [
            torch.equal(a, b)
            for a, b in zip(nats(batch, rows, distance), nats(between, rows, distance), strict=True)
        ]
        assert all(same) if distance == 3 else not any(same)


def test_attention_over_the_history_changes_the_answer():
    batch, rows = batch_of((8,))
    other, other_rows = changed_from(batch, rows, 4)
    model = stirred(depth="attention")
    one, two = model.prefill(batch, rows), model.prefill(other, other_rows)
    mixed = dataclasses.replace(two, state=one.state)  # the last state of one history, the keys of another
    codes = torch.tensor([[[1, 2]]])
    assert not torch.allclose(model.step(mixed, codes, 2), model.step(one, codes, 2), atol=1e-3)


def test_without_training_depth_attention_is_the_plain_decoder():
    batch, rows = batch_of()
    model = model_of(depth="attention")
    torch.nn.init.normal_(model.depth.child.weight, std=0.3)
    state = model.states(batch, rows)
    plain = DepthDecoder.teacher_forced_logits  # of the same weights
    ask = (
        state,
        batch.item.offsets + torch.arange(6),
        model.target_positions(batch)[:, None],
        model.targets(batch),
    )
    every = [torch.arange(len(model.targets(batch)))] * model.levels
    for got, want in zip(model(batch, rows), plain(model.depth, *ask, every), strict=True):
        torch.testing.assert_close(got, want[:, 0], **CLOSE)


def test_how_targets_are_paged_changes_neither_logits_nor_gradients(monkeypatch):
    batch, rows = batch_of((30, 0, 14))
    rows = {name: value.double() for name, value in rows.items()}
    batch.context["rating"] = Jagged(batch.context["rating"].values.double(), batch.item.offsets)
    found = []
    for short in (0, 200):
        monkeypatch.setattr(pages, "_MAX_PAGED_POSITIONS", short)
        model = stirred(depth="attention").double()
        logits = model(batch, rows)
        sum(x.square().sum() for x in logits).backward()
        found.append([*logits, *(p.grad for p in model.depth.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("grad", [True, False])
def test_beams_of_a_prompt_share_its_history_and_answer_as_if_alone(grad):
    """With gradients a step packs every beam's line behind the history, without it goes through BeamCache."""
    model = stirred(depth="attention")
    batch, rows = batch_of()
    generator = torch.Generator().manual_seed(1)
    codes = torch.stack([torch.randint(0, k, (len(LENGTHS), 7), generator=generator) for k in CODES[:3]], -1)
    with torch.set_grad_enabled(grad):
        whole = model.prefill(batch, rows)
        for level in range(model.levels):
            together = model.step(whole, codes[..., :level], level)
            for u in range(len(LENGTHS)):
                alone = model.step(whole.select_prompts(u, u + 1), codes[u : u + 1, 3:4, :level], level)[0, 0]
                torch.testing.assert_close(together[u, 3], alone, **CLOSE)
            shared = model.step(whole, codes[:1, :, :level].expand(len(LENGTHS), -1, -1), level)
            apart = model.step(whole, codes[:1, :, :level].repeat(len(LENGTHS), 1, 1), level)
            torch.testing.assert_close(shared, apart, **CLOSE)


def test_a_cache_without_keys_is_refused_by_a_decoder_that_reads_them():
    with pytest.raises(DataError, match="holds no keys"):
        model_of(depth="attention").step(DecoderCache(torch.zeros(1, 16)), [], 0)
