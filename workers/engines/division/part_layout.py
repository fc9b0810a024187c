"""PartLayout: which elements of a tensor each rank of a device mesh has, as pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nonet.stored_tensors import TensorSlice


@dataclass(frozen=True, slots=True)
class PartLayout:
    """How the ranks of a device mesh divide a tensor; each divided dimension into chunks as `torch.chunk` does.

    Attributes:
        shape: Shape of the whole tensor.
        mesh_shape: Sizes of the axes of the mesh.
        divided: Axes of the mesh with the dimension of the tensor that each divides, in the order in which they are applied.
        packed: Number of matrices that the rows consist of, of each of which a rank of the first divided axis has rows.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    divided: tuple[tuple[int, int], ...] = ()
    packed: int = 1

    @property
    def n_holders(self) -> int:
        """The number of ranks that have the same elements."""
        return math.prod(self.mesh_shape) // math.prod(self.mesh_shape[axis] for axis, _ in self.divided)

    def list_slices(self, name: str, rank: int) -> list[tuple[int, TensorSlice]]:
        """Return the slices of which a rank's part consists, each with its first row in the part; [] for an empty part.

        Args:
            name: Name of the tensor.
            rank: Index of the rank in the flattened mesh.
        """
        coordinates = self._locate(rank)
        start, stop = [0] * len(self.shape), list(self.shape)
        for axis, dim in self.divided:
            length = stop[dim] - start[dim]
            size = -(-length // self.mesh_shape[axis])
            first = start[dim]
            start[dim] = first + min(size * coordinates[axis], length)
            stop[dim] = first + min(size * (coordinates[axis] + 1), length)
        shape = [after - before for before, after in zip(start, stop, strict=True)]
        if self.divided and not math.prod(shape):
            return []
        if self.packed == 1:
            return [(0, TensorSlice(name, tuple(start), tuple(shape)))]
        rows = self._list_packed_rows(start[0], stop[0])
        return [
            (row, TensorSlice(name, (first, *start[1:]), (n_rows, *shape[1:]))) for row, first, n_rows in rows
        ]

    def list_written(self, name: str, rank: int, turn: int) -> list[tuple[int, TensorSlice]]:
        """Return the slices of `list_slices` if it is the rank's turn among those that have the same elements."""
        coordinates = self._locate(rank)
        axes = {axis for axis, _ in self.divided}
        number = 0
        for axis, size in enumerate(self.mesh_shape):
            if axis not in axes:
                number = number * size + coordinates[axis]
        return self.list_slices(name, rank) if number == turn % self.n_holders else []

    def _locate(self, rank: int) -> list[int]:
        """Return the coordinates of a rank in the mesh."""
        coordinates = []
        for size in reversed(self.mesh_shape):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return coordinates[::-1]

    def _list_packed_rows(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield, for the rows [start, stop) in the order of the ranks, ranges of rows of the whole tensor.

        A rank of the first divided axis has the rows of all matrices one after another. A range is given by its first row
        in the part, its first row in the whole tensor, and its number of rows.
        """
        ranks = self.mesh_shape[self.divided[0][0]]
        block_rows = self.shape[0] // (ranks * self.packed)
        position = start
        while position < stop:
            block, offset = divmod(position, block_rows)
            rank, matrix = divmod(block, self.packed)
            n_rows = min(block_rows - offset, stop - position)
            yield position - start, (matrix * ranks + rank) * block_rows + offset, n_rows
            position += n_rows
