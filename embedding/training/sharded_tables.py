"""Sparse tables that are sharded over ranks: pull rows before a step, push their gradients after it.

All trainers call the same operations in the same order. A shard in `serve` reads the operation from the header of
the keys, and a trainer that differs raises an error at once instead of a hang. A key is sent once per batch however
often it occurs. The trainer sums a key's gradients in position order and the owner sums those in rank order.
Therefore the results with any number of shards equal those with one shard bit for bit, those of a world with one
trainer equal those of a single process bit for bit, and those of W trainers equal them up to the order of float
additions. `nonet.bench.embedding.wire` measures the exchanges.
"""

# Shapes: N keys of one rank, U distinct keys, M keys that one shard receives from all ranks, W ranks, D width.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nonet.embedding import SliceMap, SliceMove
from nonet.embedding.exchange import (
    MOVE,
    NO_BYTES,
    PULL,
    PUSH,
    READ,
    STOP,
    TAKE,
    ExchangeHeader,
    KeyRequest,
    KeyRoute,
    RankLayout,
    Router,
    Wire,
    get_codec,
    make_route,
    select_router,
)
from nonet.embedding.tables import (
    BaseTable,
    TableSpec,
    count_packed_bytes,
    make_table,
    to_int64_keys,
)
from nonet.embedding.training.local_tables import LocalTables
from nonet.embedding.training.resharding import (
    check_moves,
    load_moved_rows,
    make_move_route,
    pack_moved_rows,
    parse_moves,
    remove_moved_rows,
)
from nonet.errors import ConfigError, DataError

MakeTable = Callable[[str, TableSpec, int], BaseTable]  # (table name, spec, seed) -> table


class ShardedTables:
    """One rank's part of the sparse world. The process group's timeout limits every wait.

    Args:
        specs: The specs of all tables of the world by name, in the same order on all ranks.
        seed: The seed of the initial rows.
        layout: This rank and the ranks of trainers and shards; None is one process without a process group.
        group: The process group of all ranks.
        wire: The name of the codec for rows and gradients between processes; "fp32" is exact.
        make: Creates a table.
        router: Finds distinct keys and their owners; None selects the native router if there is one.
        slices: The shard of each slice; None divides the slices evenly.
        local: Whether ranks that are all on one machine exchange through shared memory.

    Attributes:
        tables: The tables of this rank by name; none on a rank that only trains.
        histories: The open snapshots of these tables by name.
    """

    def __init__(
        self,
        specs: Mapping[str, TableSpec],
        *,
        seed: int,
        layout: RankLayout | None = None,
        group: Any = None,
        wire: str = "fp32",
        make: MakeTable = make_table,
        router: Router | None = None,
        slices: SliceMap | None = None,
        local: bool = False,
    ):
        self.specs = dict(specs)
        self.layout = RankLayout.single() if layout is None else layout
        self.slices = SliceMap(len(self.layout.shards)) if slices is None else slices
        self._group, self._names = group, list(self.specs)
        self.codec, self._router = get_codec(wire), router or select_router()
        own_specs = self.specs.items() if self.layout.holds else ()
        tables = {name: make(name, spec, seed) for name, spec in own_specs}
        self.local_tables = LocalTables(tables, to_host=self.layout.world > 1)
        self.tables, self.histories = self.local_tables.tables, self.local_tables.histories
        self._check_layout()
        self.wire = Wire(self.layout, group, self._names, local)
        self._routes: dict[str, KeyRoute] = {}

    @property
    def owned(self) -> range:
        """The slices whose rows this rank stores; they must be one contiguous range."""
        return self.slices.get_slices(self.shard) if self.layout.holds else range(0)

    @property
    def ranges(self) -> list[range]:
        """The contiguous ranges of slices whose rows this rank stores."""
        return self.slices.get_ranges(self.shard) if self.layout.holds else []

    @property
    def shard(self) -> int:
        """The number of this rank among the shards, from 0."""
        return self.layout.rank - self.layout.shards.start

    def count_wire_bytes(self, table: str) -> int:
        """Compute the bytes of one row of this table in transit."""
        return self.codec.row_bytes(self.specs[table].dim)

    def pull(self, table: str, keys: Tensor, *, train: bool = True) -> Tensor:
        """Read rows from their owners; every trainer calls it, possibly without keys.

        Args:
            table: The name of the table.
            keys: Keys as int64 [N].
            train: Whether to create rows.

        Returns:
            Rows [N, D].
        """
        number = self._get_table_number(table, "pull")
        if self.layout.world == 1:
            return self.local_tables.look_up(table, to_int64_keys(keys), train)
        route = self._routes[table] = self.make_route(keys)  # `push` of the same keys uses it again.
        header = self._make_header(PULL if train else READ, number)
        if self.layout.holds and self.codec.name == "fp32":
            return self._pull_fused(table, route, header)
        request = self.wire.exchange_keys(header, route)
        if self.wire.can_stream(self.codec):
            self._stream_requested_rows(request)
            return self.wire.gather_rows(route, torch.empty(0, self.specs[table].dim))
        return route.spread_rows(self._exchange_rows(request, route.counts))

    def _pull_fused(self, table: str, route: KeyRoute, header: ExchangeHeader) -> Tensor:
        """Pull on a rank that is trainer and shard: it looks up the keys that it owns while the other keys are in transit.

        The rows of its own keys never leave the process. The codec must be fp32.
        """
        rank = self.layout.rank
        own_start = sum(route.counts[:rank])
        own_keys = route.keys[own_start : own_start + route.counts[rank]]
        if self.wire.can_stream(self.codec):
            own_rows = self.wire.allocate_rows(len(own_keys), self.specs[table].dim)
            request = self.wire.exchange_keys(
                header,
                route,
                own_keys=own_keys,
                meanwhile=lambda: self.local_tables.look_up_into(
                    table, own_keys, own_rows, header.op == PULL
                ),
            )
            self._stream_requested_rows(request)
            return self.wire.gather_rows(route, own_rows)
        rows = self.wire.allocate_rows(len(route.keys), self.specs[table].dim)
        # The other ranks' rows must be contiguous for the exchange, so this rank's own rows stand before them if the route
        # begins with them, else after them.
        own_first, other_count = own_start == 0, len(rows) - len(own_keys)
        own_rows, other_rows = (
            (rows[: len(own_keys)], rows[len(own_keys) :])
            if own_first
            else (rows[other_count:], rows[:other_count])
        )
        request = self.wire.exchange_keys(
            header,
            route,
            own_keys=own_keys,
            meanwhile=lambda: self.local_tables.look_up_into(table, own_keys, own_rows, header.op == PULL),
        )
        counts = [0 if other == rank else count for other, count in enumerate(route.counts)]
        requested_rows = self.local_tables.look_up(table, request.keys, header.op == PULL)
        self.wire.exchange_rows(requested_rows, self.codec, request.counts, counts, into=other_rows)
        return route.move_to_end(own_start, len(own_keys), own_first).spread_rows(rows)

    def push(self, table: str, keys: Tensor, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Apply gradients as one optimizer step; every trainer calls it.

        Args:
            table: The name of the table.
            keys: Keys as int64 [N].
            grads: Gradients [N, D].
            step: The step.
            lr: The learning rate; None for that of the spec.
        """
        number = self._get_table_number(table, "push")
        grads_shape = (len(keys), self.specs[table].dim)
        if tuple(grads.shape) != grads_shape:
            raise DataError(
                f"push to table {table!r} wants gradients {grads_shape}, got {tuple(grads.shape)}"
            )
        if self.layout.world == 1:
            self.local_tables.apply(table, to_int64_keys(keys), grads, step, lr)
            return
        route = self._routes.pop(table, None)
        same_keys = route is not None and np.array_equal(route.requested, to_int64_keys(keys))
        route = route if route is not None and same_keys else self.make_route(keys)
        request = self.wire.exchange_keys(self._make_header(PUSH, number, step, lr), route, same_keys)
        self._exchange_gradients(request, route.sum_gradients(grads.detach().to(torch.float32)), route.counts)

    def make_route(self, keys: Tensor) -> KeyRoute:
        """Find the distinct keys of a batch's keys [N] and the ranks that own them; any thread may call it."""
        layout = self.layout
        return make_route(to_int64_keys(keys), self.slices, layout.world, layout.shards.start, self._router)

    def take(self, table: str, route: KeyRoute) -> Tensor:
        """Return copies of the route's distinct rows with their optimizer state and steps; absent rows are created.

        Returns:
            The rows as bytes in the format of `bulk.take_packed`, uint8 [U, bytes per row], which a pipeline keeps while a
            batch is in flight.
        """
        header = self._make_header(TAKE, self._get_table_number(table, "take"))
        if self.layout.world == 1:
            return self.local_tables.take_packed(table, route.keys)
        return self._exchange_packed(self.wire.exchange_keys(header, route), route.counts)

    def push_summed(
        self, table: str, route: KeyRoute, grads: Tensor, step: int, lr: float | None = None
    ) -> None:
        """Apply gradients that are already summed over equal keys; otherwise as `push`.

        Args:
            table: The name of the table.
            route: The route of the batch.
            grads: Summed gradients [U, D].
            step: The step.
            lr: The learning rate; None for that of the spec.
        """
        header = self._make_header(PUSH, self._get_table_number(table, "push"), step, lr)
        if self.layout.world == 1:
            self.local_tables.apply(table, route.keys, grads, step, lr)
            return
        self._exchange_gradients(self.wire.exchange_keys(header, route), grads, route.counts)

    def move(self, moves: Sequence[SliceMove]) -> None:
        """Move slices between shards; every trainer calls it between steps. See `reshard`."""
        if not self.layout.trains:
            raise ConfigError(f"{self.layout} holds rows and does not train: it calls serve(), not move()")
        check_moves(moves, self.slices)
        if self.layout.world > 1:
            self.wire.exchange_keys(
                self._make_header(MOVE), make_move_route(moves, self.layout.shards, self.layout.world)
            )
        self._move(moves)

    def _move(self, moves: Sequence[SliceMove]) -> None:
        """Exchange the rows of these moves table by table, then apply the moves to the slice map and drop old routes."""
        first_shard = self.layout.shards.start
        for name in self._names if self.layout.world > 1 else ():
            # The moves away from this rank, by the rank that receives the rows.
            moves_by_rank: list[list[SliceMove]] = [[] for _ in range(self.layout.world)]
            for move in moves:
                if self.layout.holds and move.source == self.shard:
                    moves_by_rank[first_shard + move.target].append(move)
            blobs = [
                pack_moved_rows(self.tables[name], rank_moves) if rank_moves else NO_BYTES
                for rank_moves in moves_by_rank
            ]
            for rank, blob in enumerate(self.wire.exchange_blobs(blobs)):
                if moves_by_rank[rank]:
                    remove_moved_rows(self.histories[name], moves_by_rank[rank])
                if len(blob):
                    load_moved_rows(self.histories[name], blob)
        self.slices = self.slices.apply_moves(moves)
        self._routes.clear()
        self.wire.forget_pulls()

    def serve(self) -> int:
        """Answer the trainers' exchanges on a rank that is only a shard, until they call `stop`.

        Returns:
            The number of exchanges.
        """
        if self.layout.trains:
            raise ConfigError(
                f"{self.layout} trains, so it takes part by pull and push; only a shard apart serves"
            )
        exchanges = 0
        no_counts = [0] * self.layout.world  # This rank requests no rows and sends no gradients.
        while True:
            request = self.wire.exchange_keys(None, None)
            op = request.header.op
            if op == STOP:
                return exchanges
            if op == PUSH:
                dim = self.specs[self._names[request.header.table]].dim
                self._exchange_gradients(request, torch.empty(0, dim), no_counts)
            elif op == TAKE:
                self._exchange_packed(request, no_counts)
            elif op == MOVE:
                self._move(parse_moves(request.keys, len(self.layout.trainers)))
            elif self.wire.can_stream(self.codec):
                self._stream_requested_rows(request)
                self.wire.finish_stream()
            else:
                self._exchange_rows(request, no_counts)
            exchanges += 1

    def stop(self) -> None:
        """End the shards' `serve`; every trainer calls it. It does nothing if no rank is only a shard."""
        if self.layout.trains and self.layout.trainers != self.layout.shards:
            self.wire.exchange_keys(self._make_header(STOP), None)

    def _exchange_rows(self, request: KeyRequest, counts: list[int]) -> Tensor:
        """Send the rows of `request` and return the rows [U, D] that this rank requested (`counts` by owner)."""
        table = self._names[request.header.table]
        if self.layout.holds:
            requested_rows = self.local_tables.look_up(table, request.keys, request.header.op == PULL)
        else:
            requested_rows = torch.empty(0, self.specs[table].dim)
        return self.wire.exchange_rows(requested_rows, self.codec, request.counts, counts)

    def _exchange_gradients(self, request: KeyRequest, grads: Tensor, counts: list[int]) -> None:
        """Send this rank's gradients (`counts` by owner) and apply those that arrive for the keys of `request`."""
        table = self._names[request.header.table]
        received = self.wire.exchange_rows(grads, self.codec, counts, request.counts)
        if self.layout.holds:
            self.local_tables.apply(table, request.keys, received, request.header.step, request.header.lr)

    def _exchange_packed(self, request: KeyRequest, counts: list[int]) -> Tensor:
        """Send the packed rows of `request` and return those that this rank requested (`counts` by owner)."""
        table = self._names[request.header.table]
        no_rows = torch.empty(0, count_packed_bytes(self.specs[table]), dtype=torch.uint8)
        requested_rows = self.local_tables.take_packed(table, request.keys) if self.layout.holds else no_rows
        return self.wire.exchange_bytes(requested_rows, request.counts, counts)

    def _stream_requested_rows(self, request: KeyRequest) -> None:
        """Send the requested rows, the first ones while later ones are looked up."""
        table = self._names[request.header.table]

        def fill(rows: Tensor, report_progress: Callable[[int], None]) -> None:
            if self.layout.holds:
                train = request.header.op == PULL
                self.local_tables.look_up_into(table, request.keys, rows, train, report_progress)

        self.wire.stream_rows(request.counts, self.specs[table].dim, fill)

    def _make_header(self, op: int, table: int = 0, step: int = 0, lr: float | None = None) -> ExchangeHeader:
        return ExchangeHeader(op, table, step, lr, self.slices.version)

    def _get_table_number(self, table: str, verb: str) -> int:
        """Return the number of a table, and check that this rank trains."""
        if not self.layout.trains:
            raise ConfigError(f"{self.layout} holds rows and does not train: it calls serve(), not {verb}()")
        if table not in self.specs:
            raise ConfigError(
                f"there is no sparse table {table!r}; there are: {', '.join(self._names) or 'none'}"
            )
        return self._names.index(table)

    def _check_layout(self) -> None:
        """Check that the layout agrees with the slice map and the process group."""
        if self.slices.shards != len(self.layout.shards):
            raise ConfigError(
                f"the slice map has {self.slices.shards} shards, the sparse world {len(self.layout.shards)}"
            )
        if self.layout.world == 1:
            return
        if not dist.is_initialized():
            raise ConfigError(
                f"{self.layout} of a sparse world needs torch.distributed; call init_process_group first"
            )
        size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        if (size, rank) != (self.layout.world, self.layout.rank):
            raise ConfigError(f"the layout says {self.layout}, the process group says rank {rank} of {size}")
