"""RankPieces: the pieces of flattened parameters that ZeRO keeps on each rank, and whole tensors gathered from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.workers import SavedTensors, SaveOptions, TensorFiles, batch_by_size
from nonet.workers.engines import ZERO_BUCKET_ELEMENTS
from nonet.workers.runtime import Membership


@dataclass(frozen=True, slots=True)
class _RankPiece:
    """The elements start:stop of a flattened parameter that a rank holds.

    Attributes:
        flat: Tensor of ZeRO that has these elements, and those of other parameters or padding.
        offset: Index of the first of these elements in `flat`.
        start: Index of the first of these elements in the parameter.
        stop: Index after the last one in the parameter.
    """

    flat: Tensor
    offset: int
    start: int
    stop: int

    def select_from(self, flat_tensor: Tensor) -> Tensor:
        """Return the elements of this piece in a tensor with the layout of `flat`: the weights or one of their moments."""
        return flat_tensor[self.offset : self.offset + self.stop - self.start]


class RankPieces:
    """The pieces of fp32 weights and their moments that ZeRO keeps on each rank, by the name of the parameter.

    Args:
        zero: The optimizer of a DeepSpeed engine.
        parameters: The engine's parameters by name.
        shapes: Their whole shapes by name.
        member: The process group.
        device: The device on which whole tensors are gathered.
    """

    def __init__(
        self,
        zero: Any,
        parameters: Mapping[str, Any],
        shapes: Mapping[str, torch.Size],
        member: Membership,
        device: torch.device,
    ):
        self._zero, self._shapes, self._member, self._device = zero, shapes, member, device
        self._own_rank = torch.distributed.get_rank(member.trainers)
        is_zero_3 = hasattr(zero, "fp32_partitioned_groups_flat")
        locate_pieces = _locate_separate_pieces if is_zero_3 else _locate_contiguous_pieces
        self._pieces_by_rank = [
            locate_pieces(zero, parameters, shapes, rank) for rank in range(member.n_trainers)
        ]

    @property
    def _own(self) -> dict[str, _RankPiece]:
        """This rank's pieces."""
        return self._pieces_by_rank[self._own_rank]

    @property
    def flat_weights(self) -> list[Tensor]:
        """The tensors that have this rank's fp32 weights."""
        return list({id(piece.flat): piece.flat for piece in self._own.values()}.values())

    def gather_whole(
        self, names: Iterable[str], state_key: str | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Gather the moments of parameters, or their fp32 weights, from all ranks. All ranks must iterate to the end.

        Args:
            names: The names of the parameters.
            state_key: Key of the moment in the state of torch's AdamW; None for the weights.

        Yields:
            The name of a parameter, and its whole moment or weights on the device.
        """
        for batch in batch_by_size(names, lambda name: self._shapes[name].numel(), ZERO_BUCKET_ELEMENTS):
            sizes_by_rank = [
                [pieces[name].stop - pieces[name].start for name in batch] for pieces in self._pieces_by_rank
            ]
            own_elements = torch.cat([self._read_piece(self._own[name], state_key) for name in batch])
            padded = torch.zeros(max(map(sum, sizes_by_rank)), device=self._device)
            padded[: len(own_elements)] = own_elements
            gathered = [torch.empty_like(padded) for _ in sizes_by_rank]
            torch.distributed.all_gather(gathered, padded, group=self._member.trainers)
            tensors_by_rank = [
                elements[: sum(sizes)].split(sizes)
                for elements, sizes in zip(gathered, sizes_by_rank, strict=True)
            ]
            for place_in_batch, name in enumerate(batch):
                whole = torch.cat([tensors[place_in_batch] for tensors in tensors_by_rank])
                yield name, whole.view(self._shapes[name])

    def select_own(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's elements of a tensor of the shape of a parameter."""
        piece = self._own[name]
        return whole.reshape(-1)[piece.start : piece.stop]

    def set_moment(self, name: str, state_key: str, value: Tensor) -> None:
        """Set this rank's piece of a parameter's moment from the whole moment."""
        piece = self._own[name]
        state = self._zero.optimizer.state[piece.flat]
        if state_key not in state:
            state[state_key] = torch.zeros_like(piece.flat, requires_grad=False)
        piece.select_from(state[state_key]).copy_(self.select_own(name, value))

    def set_weights(self, name: str, value: Tensor) -> None:
        """Set this rank's piece of a parameter's fp32 weights from the whole weights."""
        piece = self._own[name]
        piece.select_from(piece.flat.detach()).copy_(self.select_own(name, value))

    def set_steps(self, steps: int) -> None:
        """Set the number of steps of the optimizer."""
        for flat in self.flat_weights:
            self._zero.optimizer.state[flat]["step"] = torch.tensor(float(steps))

    def iterate_tensors(self) -> Iterator[Tensor]:
        """Yield this rank's fp32 weights on its device, and their moments."""
        for flat in self.flat_weights:
            state = self._zero.optimizer.state.get(flat, {})
            yield from (t for t in (flat, *state.values()) if t.device == self._device)

    def _read_piece(self, piece: _RankPiece, state_key: str | None) -> Tensor:
        """Return a piece of a moment, or of the weights if the key is None, on the device."""
        flat = piece.flat if state_key is None else self._zero.optimizer.state[piece.flat][state_key]
        return piece.select_from(flat.detach()).to(self._device)


def save_gathered(
    stem: str,
    shapes: Mapping[str, Tensor],
    gathered: Iterable[tuple[str, Tensor]],
    saving: SaveOptions,
    member: Membership,
) -> SavedTensors:
    """Return whole tensors, of which this rank keeps those that it writes. All ranks must call it.

    Args:
        stem: Name of the files without number and extension.
        shapes: All tensors by name; meta tensors suffice.
        gathered: The tensors by name.
        saving: How the state is saved.
        member: The process group.
    """
    files = TensorFiles.from_tensors(stem, shapes, saving.shard_bytes, member.n_trainers)
    own_names = files.list_own_names(member.rank)
    own = {name: tensor.detach().to("cpu", copy=True) for name, tensor in gathered if name in own_names}
    return SavedTensors(files, own)


def _locate_contiguous_pieces(
    zero: Any, parameters: Mapping[str, Any], shapes: Mapping[str, torch.Size], rank: int
) -> dict[str, _RankPiece]:
    """Return a rank's piece of each parameter under ZeRO 1 and 2.

    The parameters of a group are concatenated and split into one piece for each rank.
    """
    name_by_id = {id(parameter): name for name, parameter in parameters.items()}
    pieces = {}
    for flat, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
        # Both are indices in the concatenated parameters of the group.
        piece_begin, parameter_begin = rank * flat.numel(), 0
        for p in group:
            start, stop = (
                min(max(edge - parameter_begin, 0), p.numel())
                for edge in (piece_begin, piece_begin + flat.numel())
            )
            offset = parameter_begin + start - piece_begin if stop > start else 0
            pieces[name_by_id[id(p)]] = _RankPiece(flat, offset, start, stop)
            parameter_begin += p.numel()
    return pieces


def _locate_separate_pieces(
    zero: Any, parameters: Mapping[str, Any], shapes: Mapping[str, torch.Size], rank: int
) -> dict[str, _RankPiece]:
    """Return a rank's piece of each parameter under ZeRO 3.

    Every parameter is split into one piece for each rank; the last ones are padded.
    """
    pieces = {}
    for name, parameter in parameters.items():
        group, offset, padded_size = zero.grad_position[zero.get_param_id(parameter)]
        start, stop = (min(edge * int(padded_size), shapes[name].numel()) for edge in (rank, rank + 1))
        pieces[name] = _RankPiece(zero.fp32_partitioned_groups_flat[group], int(offset), start, stop)
    return pieces
