"""The run's own events in shuffled epochs: each row once per epoch, in an order that depends on seed, stage and epoch.

Row i of a step goes to rank i mod world. The ledger records which rows are done; there is no other state. In a continued run, the
rows are the users and events that it trains on (`Sequences.new_targets`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nonet.samples.sources._target_windows import TargetWindows
from nonet.samples.sources.base import SampleRequest, SampleSource

if TYPE_CHECKING:
    from nonet.samples.batches import ClickBatch
    from nonet.samples.ledger import SampleLedger
    from nonet.types import SampleBatch

_TIMELESS_SHARE = 0.1  # The share of a click model's rows that are trained without time features.


class _ShuffledSource:
    """Base class of the sources of both units, users and events: the rows of a step, leased when they are requested."""

    def __init__(self, request: SampleRequest):
        self.request = request

    @property
    def rows(self) -> int:
        """Number of rows of an epoch."""
        raise NotImplementedError

    @cached_property
    def ledger(self) -> SampleLedger:
        """The ledger of the rows that were used in training."""
        from nonet.samples.batches import make_row_order
        from nonet.samples.ledger import DataManifest, SampleLedger

        order = make_row_order(self.rows, self.request.seed, self.request.stage)
        manifest = DataManifest.from_rows(self.request.unit, self.rows, self.request.events().summary)
        return SampleLedger(manifest, order.hash_steps(self.request.rows), self.rows)

    def _lease_step(self, step: int) -> tuple[int, np.ndarray]:
        """Lease a step in the ledger and return its epoch and its rows, those of all ranks."""
        from nonet.samples.batches import select_step_rows
        from nonet.samples.ledger import EpochSteps, OrderSlice

        request = self.request
        epoch, start, stop = EpochSteps(self.rows, request.rows, request.rows).get_places(step)
        self.ledger.lease(OrderSlice(step, part=0, epoch=epoch, start=start, stop=stop))
        return select_step_rows(self.rows, request.rows, request.seed, request.stage, step)

    def state(self) -> Mapping[str, Any]:
        """Return an empty state; the ledger holds all of it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Ignore the state, because there is none."""


class UserWindows(_ShuffledSource):
    """Windows of the training events of a step's users."""

    @property
    def rows(self) -> int:
        """Number of rows of an epoch: all users, or those that a continued run trains on."""
        return len(self.request.events()) if self._new_users is None else len(self._new_users)

    @property
    def schema(self) -> Mapping[str, str]:
        """The meaning of the ids of each sparse feature, by name."""
        column_meanings = {
            name: f"{values.dtype} an event" for name, values in self.request.events().columns.items()
        }
        joined_kinds = self.request.joins.get_kinds() if self.request.joins else {}
        column_meanings |= {name: f"{kind} an event" for name, kind in joined_kinds.items()}
        return {"item": "int64 an event", "user": "int64 a sequence", **column_meanings}

    @cached_property
    def _target(self) -> np.ndarray | None:
        """Which events may be targets, bool [N]; None for all training events."""
        target = self.request.target
        return self.request.events().find_targets(target) if target else None

    @cached_property
    def _new_users(self) -> np.ndarray | None:
        """The rows of the users that a continued run trains on, ascending; None for a run that trains on all."""
        seq = self.request.events()
        return None if seq.new_targets is None else np.flatnonzero(seq.count_by_user(seq.new_targets))

    @cached_property
    def _new_windows(self) -> TargetWindows:
        """The windows of the events that a continued run trains on."""
        new_targets = self.request.events().new_targets
        assert new_targets is not None
        return TargetWindows(
            self.request, new_targets if self._target is None else new_targets & self._target
        )

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], SampleBatch]]:
        """Lease a step and return functions that make the batches of a rank's share; see `Samples.batch`."""
        from nonet.samples.batches import (
            count_window_positions,
            cut_target_windows,
            make_window_batch,
            split_by_size,
        )

        request, seq = self.request, self.request.events()
        assert request.sids_IL is not None  # Every model that reads sequences of users has semantic ids.
        epoch, rows = self._lease_step(step)
        rank_rows = rows[rank::world]
        if self._new_users is not None:
            return self._new_windows.make_batches(self._new_users[rank_rows], epoch)
        target = self._target
        windows = cut_target_windows(
            seq,
            rank_rows,
            history=request.history,
            stage=request.stage,
            epoch=epoch,
            seed=request.seed,
            target=target,
        )
        make_batch = partial(
            make_window_batch, seq, request.sids_IL, stage=request.stage, epoch=epoch, target=target
        )
        user_row, first_event, stop_event = windows
        parts = split_by_size(count_window_positions(seq, windows), request.chunk)
        return [partial(make_batch, (user_row[part], first_event[part], stop_event[part])) for part in parts]


class EventRows(_ShuffledSource):
    """Training events as rows of a click model; a tenth of them are trained without time features."""

    @cached_property
    def _clicks(self) -> Any:
        """The rows of all events as a click model reads them (`ClickRows`)."""
        from nonet.samples.batches import ClickRows

        request, seq = self.request, self.request.events()
        joined = list(request.joins.get_kinds()) if request.joins else []
        return ClickRows.from_target(
            seq, request.items(), request.target, request.features, request.history, joined
        )

    @cached_property
    def _training_events(self) -> np.ndarray:
        """The indices in `_clicks` of the events of the training split, or of those that a continued run trains on."""
        from nonet.samples.sequences import TRAIN

        events, new_targets = self._clicks.find_rows(TRAIN), self.request.events().new_targets
        return events if new_targets is None else events[new_targets[events]]

    @property
    def rows(self) -> int:
        """Number of rows of an epoch: all training events, or those that a continued run trains on."""
        return len(self._training_events)

    @property
    def schema(self) -> Mapping[str, str]:
        """The meaning of the ids of each sparse feature, by name."""
        return dict.fromkeys(self._clicks.features, "int64 ids of an event")

    def batch(self, step: int, rank: int, world: int) -> Sequence[Callable[[], ClickBatch]]:
        """Lease a step and return the function that makes the batch of a rank's share; see `Samples.batch`."""
        from nonet.random import rng
        from nonet.samples.batches import ClickBatch

        request, clicks = self.request, self._clicks
        _, rows = self._lease_step(step)
        is_timeless = rng(request.seed, request.stage, step, "timeless").random(len(rows)) < _TIMELESS_SHARE
        rank_rows = slice(rank, None, world)
        events = self._training_events[rows][rank_rows]
        timeless_rows = is_timeless[rank_rows]
        label, weight = clicks.gather_labels(events, request.tasks)
        return [
            lambda: ClickBatch(clicks.batch(events, without_moment=timeless_rows), label, len(rows), weight)
        ]


def open_shuffled(request: SampleRequest, options: Mapping[str, Any]) -> UserWindows | EventRows:
    """Open the source for the request's unit: users or events."""
    return UserWindows(request) if request.unit == "users" else EventRows(request)


def explain_shuffled(options: Mapping[str, Any], seed: int, engine: str | None) -> list[str]:
    """Return lines that describe which rows are read in which order."""
    return [
        "the run's own sequences, each user's (a click model: each event's) row once an epoch",
        f"order: groups of 65,536 rows shuffled by seed {seed}, the stage and the epoch, and rows inside each",
        "row i of a step goes to trainer i mod their number; engine local: the trainers' own threads",
    ]


SPEC = SampleSource(open_shuffled, explain=explain_shuffled, trains_new=True)
