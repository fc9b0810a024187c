"""Models whose weights are divided among ranks, as losses and rollouts see them; for whole models nothing changes.

A divided model gathers the weights that a pass needs. So a pass is a collective call: all ranks take the same number of them.
Where their numbers differ and no gradients are needed, ranks that are done take part in the passes of others (`join_passes`).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nonet.errors import CheckpointError
from nonet.workers import SavedTensors, SaveOptions, TensorFiles
from nonet.workers.devices import list_training_tensors

DIVISION = "division"
"""Attribute of a divided model: its `ShardedModel` or `PartitionedModel`."""


class JointPasses(ABC):
    """The passes of a divided model, of which ranks may take different numbers where no gradients are needed.

    Attributes:
        has_weights: Whether the weights are defined.
    """

    has_weights: bool

    def check_weights(self) -> None:
        """Raise CheckpointError if the weights are undefined."""
        if not self.has_weights:
            raise CheckpointError(
                "the number of trainers changed, and with it the part of the weights that each has: load a checkpoint first"
            )

    def connect_passes(
        self,
        model: Any,
        blocks: Sequence[nn.Module],
        shard_group: Any,
        data_groups: Sequence[Any],
        device: torch.device,
    ) -> None:
        """Announce the passes of a model, and let it find the largest number of passes of all ranks.

        Args:
            model: The model, whose blocks are divided.
            blocks: Its blocks, which every pass runs in their order.
            shard_group: The process group of the ranks that gather the blocks together.
            data_groups: The process groups that together connect all ranks with different samples.
            device: The device of the weights.
        """
        self._blocks: list[Any] = list(blocks)
        self._shard_group, self._data_groups = shard_group, data_groups
        self._device, self._is_joined = device, False
        if hasattr(model, "find_most_passes"):
            model.find_most_passes = self._find_most_passes
        for first_block in self._blocks[:1]:
            # With `prepend`, the hook runs before the one that gathers the block's weights.
            first_block.register_forward_pre_hook(self._announce_pass, prepend=True)

    @contextmanager
    def join_passes(self) -> Iterator[None]:
        """Let ranks take different numbers of passes without gradients (`join_passes` below)."""
        self.prepare_passes()
        self._is_joined = True
        try:
            yield
        finally:
            self._is_joined = False
        while self._blocks and self._count_passing_ranks(passing=False):
            for block in self._blocks:
                self.gather_and_release(block)
        self.reshard()

    @contextmanager
    def share_outputs(self) -> Iterator[None]:
        """Do nothing: without tensor groups, each rank chooses its own beams (`share_outputs` below)."""
        yield

    @abstractmethod
    def prepare_passes(self) -> None:
        """Gather the weights that stay gathered while ranks take different numbers of passes. All ranks must call it."""

    @abstractmethod
    def gather_and_release(self, block: Any) -> None:
        """Take part in gathering the weights of a block in a pass of other ranks."""

    @abstractmethod
    def reshard(self) -> None:
        """Release the weights that passes have left gathered."""

    def _find_most_passes(self, n_passes: int) -> int:
        """Return the largest number of passes that any rank takes; `n_passes` where ranks may take different numbers."""
        if self._is_joined or not torch.is_grad_enabled():
            return n_passes
        most = torch.tensor(n_passes, device=self._device)
        for group in self._data_groups:
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=group)
        return int(most)

    def _announce_pass(self, *_: Any) -> None:
        """Tell ranks that have taken all their passes that this rank begins one, in which they gather the blocks too."""
        if self._is_joined:
            self._count_passing_ranks(passing=True)

    def _count_passing_ranks(self, passing: bool) -> Tensor:
        """Return the number of ranks that begin a pass, on the device. All ranks must call it."""
        count = torch.tensor(int(passing), device=self._device)
        torch.distributed.all_reduce(count, group=self._shard_group)
        return count


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


def iterate_weight_pairs(frozen: Any, model: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each weight of a frozen copy that is on this rank, with that of the model. All ranks must iterate to the end."""
    if hasattr(getattr(model, DIVISION, None), "iterate_weight_pairs"):
        yield from getattr(model, DIVISION).iterate_weight_pairs(frozen)
        return
    weights = dict(model.named_parameters())  # Both are divided in the same way.
    for name, frozen_weight in frozen.named_parameters():
        yield frozen_weight, weights[name]


def copy_frozen_structure(model: nn.Module) -> nn.Module:
    """Return `copy_structure` of a model in evaluation mode that is not trained, with its own buffers of the state dict.

    The memory's weights, which are such buffers, may change; frozen weights are shared.
    """
    structure = copy_structure(model)
    state_names = set(structure.state_dict())
    for name, buffer in structure.named_buffers():
        if name in state_names:
            set_buffer(structure, name, buffer.clone())
    return structure.eval().requires_grad_(False)


def set_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    """Replace a buffer, given by its path."""
    path, _, own_name = name.rpartition(".")
    model.get_submodule(path)._buffers[own_name] = buffer


def copy_structure(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are meta tensors and whose buffers are those of the model."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = meta
    return copy.deepcopy(model, memo)


def is_reduced(parameter: Tensor) -> bool:
    """Return whether a parameter has fewer bits than fp32, so that an update can be too small for it."""
    return parameter.is_floating_point() and parameter.element_size() < 4
