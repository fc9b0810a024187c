"""The supervised loss: a sum over targets, constrained by the catalogue when there is one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nonet.errors import DataError
from nonet.models.generation.logprob import log_prob
from nonet.models.generation.trie import Trie
from nonet.models.sid_decoder.loss import compute_sid_loss
from nonet.models.spec import build_model
from nonet.types import Jagged, SampleBatch

CODES = (4, 3, 2)
SIDS = np.array(
    [[0, 0, 0], [0, 0, 1], [0, 2, 0], [1, 1, 0], [2, 0, 0], [2, 1, 0], [2, 2, 1], [3, 0, 1]], np.int32
)


every_depth = pytest.mark.parametrize("depth", ["mlp", "attention"])


def model_of(depth="mlp"):
    options = {"width": 16, "layers": 1, "heads": 2, "dropout": 0.0, "depth": depth}
    model = build_model(options, CODES, {"item": 4, "user": 4}, 0)
    torch.manual_seed(1)
    for weight in model.depth.get_zero_weights():
        torch.nn.init.normal_(weight)
    return model


def batch_of(items, lengths, mask):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    events = len(items)
    generator = torch.Generator().manual_seed(7)
    batch = SampleBatch(
        item=Jagged(torch.tensor(items), offsets),
        sid=torch.from_numpy(SIDS[items]).long(),
        time=Jagged(torch.arange(events), offsets),
        event=Jagged(torch.zeros(events, dtype=torch.long), offsets),
        context={"user": torch.arange(len(lengths))},
        loss_mask=Jagged(torch.tensor(mask), offsets),
        target=None,
        uid=[str(b) for b in range(len(lengths))],
    )
    rows = {
        "item": torch.randn(events, 4, generator=generator),
        "user": torch.randn(len(lengths), 4, generator=generator),
    }
    return batch, rows


def two_users():
    return batch_of([0, 3, 4, 6, 7, 1, 2], [4, 3], [False, True, False, True, True, True, False])


@every_depth
def test_without_a_catalogue_it_is_the_summed_cross_entropy_of_forward(depth):
    model, (batch, rows) = model_of(depth), two_users()
    loss, count = compute_sid_loss(model, batch, rows)
    sid = model.targets(batch)
    logits = model(batch, rows)
    want = -sum(x.log_softmax(-1).gather(1, sid[:, [level]]).sum() for level, x in enumerate(logits))
    assert count == 4
    torch.testing.assert_close(loss, want, atol=1e-4, rtol=1e-5)


@every_depth
def test_with_a_catalogue_it_is_the_constrained_log_probability_that_rl_uses(depth):
    model, (batch, rows) = model_of(depth), two_users()
    trie = Trie.build(SIDS, CODES)
    loss, count = compute_sid_loss(model, batch, rows, trie)
    total = 0.0
    for event in batch.loss_mask.values.nonzero().squeeze(1).tolist():
        sequence = int(event >= 4)
        begin = 4 * sequence
        prompt, _ = batch_of(
            batch.item.values[begin:event].tolist(), [event - begin], [False] * (event - begin)
        )
        prompt.time.values += begin
        sliced = {"item": rows["item"][begin:event], "user": rows["user"][[sequence]]}
        total -= log_prob(model, prompt, sliced, batch.sid[event][None, None], trie).sum()
    assert count == 4
    torch.testing.assert_close(loss, total, atol=1e-4, rtol=1e-5)


@every_depth
def test_halves_of_a_batch_add_up_to_the_whole(depth):
    model, trie = model_of(depth), Trie.build(SIDS, CODES)
    batch, rows = two_users()
    whole, count = compute_sid_loss(model, batch, rows, trie, ahead=3)
    parts = []
    for sequence, (begin, end) in enumerate(((0, 4), (4, 7))):
        part, _ = batch_of(
            batch.item.values[begin:end].tolist(), [end - begin], batch.loss_mask.values[begin:end].tolist()
        )
        part.time.values += begin
        parts.append(
            compute_sid_loss(
                model,
                part,
                {"item": rows["item"][begin:end], "user": rows["user"][[sequence]]},
                trie,
                ahead=3,
            )
        )
    torch.testing.assert_close(whole, parts[0][0] + parts[1][0], atol=1e-4, rtol=1e-5)
    assert count == parts[0][1] + parts[1][1]


@every_depth
def test_looking_ahead_weighs_farther_states_less(depth):
    model, (batch, rows) = model_of(depth), batch_of([0, 3, 4], [3], [False, False, True])
    trie = Trie.build(SIDS, CODES)
    near, _ = compute_sid_loss(model, batch, rows, trie)
    states, sid = model.states(batch, rows), model.targets(batch)
    every = [torch.arange(1)] * 3

    def nats(position):
        taught = model.teacher_forced_logits(batch, states, torch.tensor([[position]]), sid, every)
        total, node = 0.0, torch.zeros(1, dtype=torch.long)
        for level, logits_MAK in enumerate(taught):
            child, logits = trie.find_children(level, node), logits_MAK[:, 0]
            logits = logits.masked_fill(child < 0, -torch.inf)
            total -= logits.log_softmax(-1)[0, sid[0, level]]
            node = child[0, sid[0, level]][None]
        return total

    torch.testing.assert_close(near, nats(2), atol=1e-5, rtol=1e-5)
    far, count = compute_sid_loss(model, batch, rows, trie, ahead=2)
    torch.testing.assert_close(far, (nats(2) + nats(1) / 2) / 1.5, atol=1e-5, rtol=1e-5)
    assert count == 1


@every_depth
def test_a_batch_without_targets_costs_nothing_and_can_be_differentiated(depth):
    model = model_of(depth)
    batch, rows = batch_of([0, 1], [2], [False, False])
    loss, count = compute_sid_loss(model, batch, rows, Trie.build(SIDS, CODES))
    loss.backward()
    assert (float(loss.detach()), count) == (0.0, 0)


def test_a_target_outside_the_catalogue_is_an_error():
    model, (batch, rows) = model_of(), two_users()
    some = Trie.build(SIDS, CODES, items=np.array([0, 1, 2, 3, 4]))
    with pytest.raises(DataError, match=r"1 of 4 targets .* first \(3, 0, 1\)"):
        compute_sid_loss(model, batch, rows, some)


@every_depth
def test_a_few_steps_learn_a_fixed_sequence(depth):
    model, trie = model_of(depth), Trie.build(SIDS, CODES)
    batch, rows = batch_of([0, 3, 4, 6, 7, 1, 2, 5], [8], [True] * 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first = None
    for _ in range(40):
        loss, count = compute_sid_loss(model, batch, rows, trie)
        first = first or float(loss.detach()) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert first > 1.5
    assert float(loss.detach()) / count < 0.2


@every_depth
def test_smoothing_gives_a_share_of_each_level_to_the_legal_siblings(depth):
    model, (batch, rows) = model_of(depth), batch_of([0, 3, 4], [3], [False, False, True])
    trie = Trie.build(SIDS, CODES)
    states, sid = model.states(batch, rows), model.targets(batch)
    taught = model.teacher_forced_logits(
        batch, states, torch.tensor([[2]]), sid, [torch.arange(1)] * len(CODES)
    )
    expected, node = 0.0, torch.zeros(1, dtype=torch.long)
    for level, logits_MAK in enumerate(taught):
        child = trie.find_children(level, node)[0]
        logp = logits_MAK[0, 0].masked_fill(child < 0, -torch.inf).log_softmax(-1)
        expected -= 0.8 * logp[sid[0, level]] + 0.2 * logp[child >= 0].mean()
        node = child[sid[0, level]][None]
    loss, _ = compute_sid_loss(model, batch, rows, trie, smoothing=0.2)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


@every_depth
def test_a_target_counts_as_its_weight_says(depth):
    model, trie = model_of(depth), Trie.build(SIDS, CODES)
    batch, rows = two_users()
    targets = int(batch.loss_mask.values.sum())
    weight = torch.arange(1.0, targets + 1)
    loss, _ = compute_sid_loss(model, batch, rows, trie, weight_M=weight)
    each = []
    for number, event in enumerate(batch.loss_mask.values.nonzero().squeeze(1).tolist()):
        mask = torch.zeros_like(batch.loss_mask.values)
        mask[event] = True
        one = replace(batch, loss_mask=Jagged(mask, batch.loss_mask.offsets))
        each.append((number + 1) * compute_sid_loss(model, one, rows, trie)[0])
    torch.testing.assert_close(loss, sum(each), atol=1e-4, rtol=1e-5)
