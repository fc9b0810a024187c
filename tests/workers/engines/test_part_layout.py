"""Which elements of a tensor the ranks of a mesh have: each is written once, and packed rows are where ranks have them."""

from __future__ import annotations

import math

import pytest
import torch

from nonet.workers.engines.division import PartLayout

MESHES = [
    ((3,), ((0, 0),)),
    ((2, 2), ((1, 0),)),  # replicate and shard
    ((2, 2), ((1, 1), (0, 0))),  # shard and tensor, which divides columns
    ((2, 3, 2), ((2, 0), (1, 0))),
]


@pytest.mark.parametrize(("mesh_shape", "divided"), MESHES)
@pytest.mark.parametrize("turn", [0, 1])
def test_each_element_is_written_by_one_rank(mesh_shape, divided, turn):
    layout = PartLayout((8, 6), mesh_shape, divided)
    count = torch.zeros(8, 6)
    for rank in range(math.prod(mesh_shape)):
        for _, piece in layout.list_written("w", rank, turn):
            piece.select_from(count).add_(1)
    assert torch.equal(count, torch.ones(8, 6))


@pytest.mark.parametrize("packed", [1, 3])
def test_a_part_consists_of_its_slices_in_order(packed):
    """A rank of the tensor axis has rows of each packed matrix, one after another; the shard axis divides these."""
    whole = torch.arange(36.0).view(18, 2)
    layout = PartLayout((18, 2), (2, 3), ((0, 0), (1, 0)), packed)
    in_order = whole.view(packed, 2, -1, 2).transpose(0, 1).reshape(18, 2)
    for rank in range(6):
        tensor, shard = divmod(rank, 3)
        part = in_order.chunk(2)[tensor].chunk(3)[shard]
        slices = layout.list_slices("w", rank)
        assert torch.equal(torch.cat([piece.select_from(whole) for _, piece in slices]), part)
        assert [row for row, _ in slices] == [
            sum(piece.shape[0] for _, piece in slices[:i]) for i in range(len(slices))
        ]


def test_a_rank_without_rows_writes_nothing_and_a_number_is_written_once():
    assert PartLayout((2, 4), (3,), ((0, 0),)).list_slices("w", 2) == []
    number = PartLayout((), (2, 2))
    assert sum(len(number.list_written("n", rank, turn=5)) for rank in range(4)) == 1
