"""The order of rows: every row once an epoch, whoever reads; large data in groups, small data as one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from nonet.samples.ledger.order import GROUP_ROWS, EpochSteps, RowOrder, StepRange

GROUPS = np.array([50, 3, 17, 100, 1, 29])


def rows_of(order, steps, world, epoch=0):
    """Rows by step as `world` ranks read them."""
    found = []
    for step in range(epoch * steps.steps_per_epoch, (epoch + 1) * steps.steps_per_epoch):
        slices = [part for rank in range(world) for part in steps.cut_slices(step)[rank::world]]
        slices.sort(key=lambda part: part.part)
        found.append(
            np.concatenate([order.get_rows(part.epoch, part.start, part.stop) for part in slices]).tolist()
        )
    return found


@pytest.mark.parametrize("in_group", [True, False])
def test_every_row_comes_once_an_epoch_and_epochs_differ(in_group):
    order, steps = RowOrder(GROUPS, 7, "s", in_group), EpochSteps(200, 32, 5)
    epochs = [np.concatenate(rows_of(order, steps, 1, epoch)).tolist() for epoch in range(3)]
    assert all(sorted(rows) == list(range(200)) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_the_global_order_is_the_same_for_every_world(world):
    order, steps = RowOrder(GROUPS, 7, "s"), EpochSteps(200, 32, 5)
    assert rows_of(order, steps, world) == rows_of(order, steps, 1)


def test_without_a_seed_it_is_the_order_of_the_files():
    assert RowOrder(GROUPS, None).get_rows(3, 10, 120).tolist() == list(range(10, 120))


def test_groups_are_permuted_whole_and_a_step_permutes_only_its_own():
    order = RowOrder.from_rows(GROUP_ROWS * 3 + 10, 5, "s")
    groups = order.get_rows(0, 0, order.rows) // GROUP_ROWS
    changes = np.flatnonzero(np.diff(groups))
    assert len(changes) == 3
    assert sorted({int(groups[0]), *(int(groups[at + 1]) for at in changes)}) == [0, 1, 2, 3]


def test_another_seed_name_or_group_is_another_digest():
    digests = {
        RowOrder(GROUPS, 7, "s").digest,
        RowOrder(GROUPS, 8, "s").digest,
        RowOrder(GROUPS, 7, "t").digest,
        RowOrder(GROUPS, 7, "s", False).digest,
        RowOrder(GROUPS[::-1], 7, "s").digest,
    }
    assert len(digests) == 5


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 3)])
def test_a_range_of_steps_is_its_slices_and_each_starts_in_one_part_of_the_epoch(rank, world):
    steps = EpochSteps(1003, 100, 7)
    every = [part for step in range(5, 25) for part in steps.cut_slices(step)[rank::world]]
    epochs = list(StepRange(steps, 5, 25, rank, world).iterate_epochs())
    assert [part for epoch in epochs for part in epoch] == every
    cuts = [0, 1, 214, 251, 700, 1003]  # a slice starts at 214
    for epoch in epochs:
        found = [part for start, stop in pairwise(cuts) for part in epoch.iterate_starting_in(start, stop)]
        assert found == list(epoch)
