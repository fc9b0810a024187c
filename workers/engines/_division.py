"""Models whose weights are divided among ranks, as losses and rollouts see them; for whole models nothing changes.

A divided model gathers the weights that a pass needs. So a pass is a collective call: all ranks take the same number of them,
or gather the whole model first (`gather_model`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

DIVISION = "division"
"""Attribute of a divided model: its `ShardedModel`."""


def is_divided(model: Any) -> bool:
    """Return whether the weights of a model are divided among ranks, so that each of its passes is a collective call."""
    return hasattr(model, DIVISION)


@contextmanager
def gather_model(*models: Any) -> Iterator[None]:
    """Keep the whole weights of models on every rank, for passes without gradients of which ranks take different numbers.

    All ranks must enter and leave it together if a model is divided.
    """
    divisions = [getattr(model, DIVISION) for model in models if is_divided(model)]
    for division in divisions:
        division.gather()
    try:
        yield
    finally:
        for division in divisions:
            division.release()


def keep_whole(model: Any) -> None:
    """Keep the whole weights of a divided model on every rank until `drop_whole`. All ranks must call it."""
    if is_divided(model):
        getattr(model, DIVISION).keep()


def drop_whole(model: Any) -> None:
    """Release the weights that `keep_whole` keeps."""
    if is_divided(model):
        getattr(model, DIVISION).drop()


def is_kept_whole(model: Any) -> bool:
    """Return whether a rank may take a pass of a model alone."""
    return not is_divided(model) or getattr(model, DIVISION).is_kept


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


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor of one that may be divided among ranks. All ranks must call it."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()
