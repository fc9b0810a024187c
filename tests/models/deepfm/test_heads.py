"""Heads of several tasks: experts that are shared, gates that mix them, and a tower per task."""

from __future__ import annotations

import torch

from nonet.models.deepfm.deepfm import DeepFM
from nonet.models.deepfm.heads import TaskHeads
from nonet.random import rng

DIMS = {"user": 5, "item": 5}


def draw(*shape):
    return torch.from_numpy(rng(2, "inputs", *shape).standard_normal(shape, "f4"))


def test_a_gate_mixes_the_experts_of_its_task():
    heads = TaskHeads(6, 3, hidden=(5, 4), experts=2, towers=(3,), dropout=0.0).eval()
    inputs = draw(7, 6)
    for task, (gate, tower) in enumerate(zip(heads.gates, heads.towers, strict=True)):
        weight = torch.softmax(inputs @ gate.weight.T, 1)
        mixed = sum(weight[:, e : e + 1] * expert(inputs) for e, expert in enumerate(heads.experts))
        # One product of matrices is rounded otherwise than the sum of two: some units of float32.
        torch.testing.assert_close(heads(inputs)[:, task], tower(mixed)[:, 0], rtol=1e-5, atol=1e-6)


def test_one_expert_is_a_shared_bottom_without_gates():
    heads = TaskHeads(6, 2, hidden=(5,), experts=1, towers=(), dropout=0.0).eval()
    inputs = draw(4, 6)
    assert len(heads.gates) == 0
    expected = torch.cat([tower(heads.experts[0](inputs)) for tower in heads.towers], 1)
    torch.testing.assert_close(heads(inputs), expected)
    assert [tuple(matrix.shape) for matrix in heads.hidden_matrices()] == [(5, 6)]


def test_tasks_share_the_factorisation_machine_with_a_scale_of_their_own():
    model = DeepFM(DIMS, hidden=(6,), tasks=("bought", "returned"), experts=2, towers=(4,), seed=3).eval()
    rows = {name: draw(7, 5) + index for index, name in enumerate(DIMS)}
    before = model(rows)
    assert before.shape == (7, 3)
    with torch.no_grad():
        model.scale[1] = 3.0
    shared = sum(value[:, 0] for value in rows.values()) + (rows["user"][:, 1:] * rows["item"][:, 1:]).sum(1)
    # Sums of about twenty float32 products in another order.
    torch.testing.assert_close(model(rows)[:, 1] - before[:, 1], 2 * shared, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(rows)[:, [0, 2]], before[:, [0, 2]])


def test_a_label_of_weight_zero_teaches_nothing():
    model = DeepFM(DIMS, hidden=(6,), dropout=0.0, tasks=("bought",), seed=3)
    rows = {name: draw(4, 5) for name in DIMS}
    label, weight = torch.tensor([[1.0, 1.0]] * 4), torch.tensor([[1.0, 0.5], [1.0, 0.0]] * 2)
    loss = model.compute_loss(rows, label, weight)
    other_label = torch.where(weight > 0, label, 1.0 - label)
    assert torch.equal(model.compute_loss(rows, other_label, weight), loss)
    log_losses = torch.nn.functional.softplus(-model(rows))
    torch.testing.assert_close(loss, (log_losses * weight).sum())


def test_a_model_of_one_task_has_the_weights_that_earlier_versions_stored():
    names = list(DeepFM(DIMS, hidden=(6,)).state_dict())
    assert names == ["bias", "mlp.0.weight", "mlp.0.bias", "mlp.3.weight", "mlp.3.bias"]
