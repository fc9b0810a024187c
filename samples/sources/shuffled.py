"""The run's own events in shuffled epochs: each row once per epoch, in an order that depends on seed, stage and epoch.

Row i of a step goes to rank i mod world. The ledger records which rows are done; there is no other state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nonet.samples.sources.base import SampleRequest, SampleSource

if TYPE_CHECKING:
    from nonet.samples.batches import ClickBatch
    from nonet.samples.ledger import SampleLedger
    from nonet.types import SampleBatch

_TIMELESS = 0.1  # share of a click model's rows that are trained without time features


class _ShuffledSource:
    """Common part of both units: rows of a step, leased when they are requested."""

    def __init__(self, request: SampleRequest):
        self.ask = request

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        raise NotImplementedError

    @cached_property
    def ledger(self) -> SampleLedger:
        """The ledger of an epoch's rows that were used."""
        from nonet.samples.batches import make_row_order
        from nonet.samples.ledger import DataManifest, SampleLedger

        order = make_row_order(self.rows, self.ask.seed, self.ask.stage)
        manifest = DataManifest.from_rows(self.ask.unit, self.rows, self.ask.events().summary)
        return SampleLedger(manifest, order.hash_steps(self.ask.rows), self.rows, first_order=order.digest)

    def _lease_step(self, step: int) -> tuple[int, np.ndarray]:
        """Lease a step and return its epoch and its rows over all ranks."""
        from nonet.samples.batches import select_step_rows
        from nonet.samples.ledger import EpochSteps, OrderSlice

        ask = self.ask
        epoch, start, stop = EpochSteps(self.rows, ask.rows, ask.rows).get_places(step)
        self.ledger.lease(OrderSlice(step, 0, epoch, start, stop))
        return select_step_rows(self.rows, ask.rows, ask.seed, ask.stage, step)

    def state(self) -> Mapping[str, Any]:
        """Return an empty state; the ledger holds all of it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Ignore the state, because there is none."""


class UserWindows(_ShuffledSource):
    """Windows of the training events of a step's users."""

    @property
    def rows(self) -> int:
        """Rows of an epoch: all users."""
        return len(self.ask.events())

    @property
    def schema(self) -> Mapping[str, str]:
        """Sparse feature -> meaning of its ids."""
        columns = {name: f"{values.dtype} an event" for name, values in self.ask.events().columns.items()}
        joined = self.ask.joins.get_kinds() if self.ask.joins else {}
        columns |= {name: f"{kind} an event" for name, kind in joined.items()}
        return {"item": "int64 an event", "user": "int64 a sequence", **columns}

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], SampleBatch]]:
        """Lease a step and return functions that make the batches of a rank's share."""
        from nonet.samples.batches import (
            count_window_positions,
            cut_target_windows,
            make_window_batch,
            split_by_size,
        )

        ask, seq = self.ask, self.ask.events()
        assert ask.sids_IL is not None  # models of users have semantic ids
        target = seq.targets[ask.target] if ask.target else None
        epoch, rows = self._lease_step(step)
        windows = cut_target_windows(
            seq,
            rows[rank::world],
            history=ask.history,
            stage=ask.stage,
            epoch=epoch,
            seed=ask.seed,
            target=target,
        )
        make = partial(make_window_batch, seq, ask.sids_IL, stage=ask.stage, epoch=epoch, target=target)
        row, block, stop = windows
        parts = split_by_size(count_window_positions(seq, windows), ask.chunk)
        return [partial(make, (row[part], block[part], stop[part])) for part in parts]


class EventRows(_ShuffledSource):
    """Training events as rows of a click model; a tenth of them learn without their moment."""

    @cached_property
    def _clicks(self) -> Any:
        from nonet.samples.batches import ClickRows

        ask, seq = self.ask, self.ask.events()
        return ClickRows.from_target(seq, ask.items(), ask.target, ask.features, ask.history)

    @cached_property
    def _trained(self) -> np.ndarray:
        from nonet.samples.sequences import TRAIN

        return self._clicks.find_rows(TRAIN)

    @property
    def rows(self) -> int:
        """Rows of an epoch: all training events."""
        return len(self._trained)

    @property
    def schema(self) -> Mapping[str, str]:
        """Sparse feature -> meaning of its ids."""
        return dict.fromkeys(self._clicks.list_features(), "int64 ids of an event")

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], ClickBatch]]:
        """Lease a step and return the function that makes the batch of a rank's share."""
        from nonet.random import rng
        from nonet.samples.batches import ClickBatch

        ask, clicks = self.ask, self._clicks
        _, places = self._lease_step(step)
        timeless = rng(ask.seed, ask.stage, step, "timeless").random(len(places)) < _TIMELESS
        mine = slice(rank, None, world)
        index = self._trained[places][mine]
        return [
            lambda: ClickBatch(
                clicks.batch(index, without_moment=timeless[mine]), clicks.label[index], len(places)
            )
        ]


def open_shuffled(request: SampleRequest, options: Mapping[str, Any]) -> UserWindows | EventRows:
    """Return the run's events as the stage's unit requires."""
    return UserWindows(request) if request.unit == "users" else EventRows(request)


def explain_shuffled(options: Mapping[str, Any], seed: int, engine: str | None) -> list[str]:
    """Describe which rows are read in which order."""
    return [
        "the run's own sequences, each user's (a click model: each event's) row once an epoch",
        f"order: groups of 65,536 rows shuffled by seed {seed}, the stage and the epoch, and rows inside each",
        "row i of a step goes to trainer i mod their number; engine local: the trainers' own threads",
    ]


SPEC = SampleSource(open_shuffled, explain=explain_shuffled)
