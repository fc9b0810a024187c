"""Models whose weights are divided among ranks, as losses and rollouts see them; for whole models nothing changes.

A divided model gathers the weights that a pass needs. So a pass is a collective call: all ranks take the same number of them.
Where their numbers differ and no gradients are needed, ranks that are done take part in the passes of others (`join_passes`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nonet.workers import SavedTensors, SaveOptions, TensorFiles
from nonet.workers.devices import list_training_tensors

DIVISION = "division"
"""Attribute of a divided model: its `ShardedModel`."""


def is_divided(model: Any) -> bool:
    """Return whether the weights of a model are divided among ranks, so that each of its passes is a collective call."""
    return hasattr(model, DIVISION)


@contextmanager
def join_passes(model: Any) -> Iterator[None]:
    """Let the ranks of a divided model take different numbers of passes without gradients.

    A rank that has taken its passes takes part in those of the other ranks before it leaves. All ranks must enter it together
    if the model is divided, and must not begin other collective calls in it.
    """
    if not is_divided(model):
        yield
        return
    with getattr(model, DIVISION).join_passes():
        yield


@contextmanager
def share_outputs(model: Any) -> Iterator[None]:
    """Give the ranks of a tensor group the states and logits of its first rank, so that all of them choose the same beams.

    Each rank rounds differently, so beams that are nearly equal could be ordered differently.
    """
    if not is_divided(model):
        yield
        return
    with getattr(model, DIVISION).share_outputs():
        yield


def list_weights(model: Any) -> list[Tensor]:
    """Return the tensors of a model on this rank; of a divided model its parts and its buffers."""
    return getattr(model, DIVISION).list_weights() if is_divided(model) else list_training_tensors(model)


def save_model(model: Any, ranks: int, saving: SaveOptions) -> SavedTensors:
    """Return the weights and buffers of a model, which all ranks write together."""
    if is_divided(model):
        return getattr(model, DIVISION).save_weights(saving)
    state = model.state_dict()
    return SavedTensors(TensorFiles.from_tensors("model", state, saving.shard_bytes, ranks), state)


def copy_frozen(model: Any) -> Any:
    """Return a copy of a model in evaluation mode that is not trained; it is divided as the model is."""
    if is_divided(model):
        return getattr(model, DIVISION).copy_frozen()
    return copy.deepcopy(model).eval().requires_grad_(False)


def copy_structure(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are meta tensors and whose buffers are those of the model."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = meta
    return copy.deepcopy(model, memo)
