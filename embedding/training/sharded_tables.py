"""Sparse tables that are sharded over ranks: pull rows before a step, push their gradients after it.

All trainers call the same operations in the same order. A shard in `serve` reads the operation from the header of
the keys, and a trainer that differs raises an error at once instead of a hang. A key is sent once per batch however
often it occurs. The trainer sums a key's gradients in position order and the owner sums those in rank order.
Therefore any number of shards equals one bit for bit, a world of one trainer equals a single process bit for bit,
and W trainers equal it up to the order of float additions. `nonet.bench.embedding.wire` measures it.
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
    NOTHING,
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

MakeTable = Callable[[str, TableSpec, int], BaseTable]


class ShardedTables:
    """One rank's part of the sparse world; `tables` are its own tables (none on a rank that only trains).

    `wire` is the codec of rows and gradients between processes (fp32 is exact), `make` creates a table, `router`
    finds distinct keys and their owners. With `local`, ranks that are all on one machine exchange through shared
    memory. The process group's timeout limits every wait.
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
        """The slices whose rows this rank has, if they are one block."""
        return self.slices.get_slices(self.shard) if self.layout.holds else range(0)

    @property
    def ranges(self) -> list[range]:
        """The blocks of slices whose rows this rank has."""
        return self.slices.get_ranges(self.shard) if self.layout.holds else []

    @property
    def shard(self) -> int:
        """This rank's number among the shards."""
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
        plan = self._routes[table] = self.make_route(keys)
        header = self._make_header(PULL if train else READ, number)
        if self.layout.holds and self.codec.name == "fp32":
            return self._pull_fused(table, plan, header)
        request = self.wire.exchange_keys(header, plan)
        if self.wire.can_stream(self.codec):
            self._stream(request)
            return self.wire.gather_rows(plan, torch.empty(0, self.specs[table].dim))
        return plan.spread_rows(self._answer_rows(request, plan.counts))

    def _pull_fused(self, table: str, plan: KeyRoute, header: ExchangeHeader) -> Tensor:
        """Look up this rank's own keys while the other keys are in transit; own rows never leave the process."""
        rank = self.layout.rank
        start = sum(plan.counts[:rank])
        own = plan.keys[start : start + plan.counts[rank]]
        if self.wire.can_stream(self.codec):
            mine = self.wire.allocate_rows(len(own), self.specs[table].dim)
            request = self.wire.exchange_keys(
                header,
                plan,
                own=own,
                meanwhile=lambda: self.local_tables.look_up_into(table, own, mine, header.op == PULL),
            )
            self._stream(request)
            return self.wire.gather_rows(plan, mine)
        rows = self.wire.allocate_rows(len(plan.keys), self.specs[table].dim)
        # Own rows come before the others if that is the route's order, else after them.
        first, others = start == 0, len(rows) - len(own)
        mine, theirs = (rows[: len(own)], rows[len(own) :]) if first else (rows[others:], rows[:others])
        request = self.wire.exchange_keys(
            header,
            plan,
            own=own,
            meanwhile=lambda: self.local_tables.look_up_into(table, own, mine, header.op == PULL),
        )
        counts = [0 if other == rank else count for other, count in enumerate(plan.counts)]
        answer = self.local_tables.look_up(table, request.keys, header.op == PULL)
        self.wire.exchange_rows(answer, self.codec, request.counts, counts, into=theirs)
        return plan.move_to_end(start, len(own), first).spread_rows(rows)

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
        expected = (len(keys), self.specs[table].dim)
        if tuple(grads.shape) != expected:
            raise DataError(f"push to table {table!r} wants gradients {expected}, got {tuple(grads.shape)}")
        if self.layout.world == 1:
            self.local_tables.apply(table, to_int64_keys(keys), grads, step, lr)
            return
        plan = self._routes.pop(table, None)
        same = plan is not None and np.array_equal(plan.asked, to_int64_keys(keys))
        plan = plan if plan is not None and same else self.make_route(keys)
        request = self.wire.exchange_keys(self._make_header(PUSH, number, step, lr), plan, same)
        self._receive_gradients(request, plan.sum_gradients(grads.detach().to(torch.float32)), plan.counts)

    def make_route(self, keys: Tensor) -> KeyRoute:
        """Compute the route of a batch's keys [N]; any thread may call it."""
        layout = self.layout
        return make_route(to_int64_keys(keys), self.slices, layout.world, layout.shards.start, self._router)

    def take(self, table: str, plan: KeyRoute) -> Tensor:
        """Return the route's distinct rows with their optimizer state and steps, as bytes [U, B] (`bulk.take_packed`).

        A pipeline keeps them while a batch is in flight. Absent rows are created.
        """
        header = self._make_header(TAKE, self._get_table_number(table, "take"))
        if self.layout.world == 1:
            return self.local_tables.take_packed(table, plan.keys)
        return self._answer_packed(self.wire.exchange_keys(header, plan), plan.counts)

    def push_summed(
        self, table: str, plan: KeyRoute, grads: Tensor, step: int, lr: float | None = None
    ) -> None:
        """Apply gradients that are already summed over equal keys; otherwise as `push`.

        Args:
            table: The name of the table.
            plan: The route of the batch.
            grads: Summed gradients [U, D].
            step: The step.
            lr: The learning rate; None for that of the spec.
        """
        header = self._make_header(PUSH, self._get_table_number(table, "push"), step, lr)
        if self.layout.world == 1:
            self.local_tables.apply(table, plan.keys, grads, step, lr)
            return
        self._receive_gradients(self.wire.exchange_keys(header, plan), grads, plan.counts)

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
        """Exchange the rows of these moves table by table, then use the new slice map."""
        first = self.layout.shards.start
        for name in self._names if self.layout.world > 1 else ():
            by_rank: list[list[SliceMove]] = [[] for _ in range(self.layout.world)]
            for move in moves:
                if self.layout.holds and move.source == self.shard:
                    by_rank[first + move.target].append(move)
            blobs = [pack_moved_rows(self.tables[name], some) if some else NOTHING for some in by_rank]
            for rank, blob in enumerate(self.wire.exchange_blobs(blobs)):
                if by_rank[rank]:
                    remove_moved_rows(self.histories[name], by_rank[rank])
                if len(blob):
                    load_moved_rows(self.histories[name], blob)
        self.slices = self.slices.apply_moves(moves)
        self._routes.clear()
        self.wire.forget_pulls()

    def serve(self) -> int:
        """Take part in the trainers' exchanges as a shard until they stop, and return the number of exchanges."""
        if self.layout.trains:
            raise ConfigError(
                f"{self.layout} trains, so it takes part by pull and push; only a shard apart serves"
            )
        exchanges = 0
        nobody = [0] * self.layout.world
        while True:
            request = self.wire.exchange_keys(None, None)
            op = request.header.op
            if op == STOP:
                return exchanges
            if op == PUSH:
                dim = self.specs[self._names[request.header.table]].dim
                self._receive_gradients(request, torch.empty(0, dim), nobody)
            elif op == TAKE:
                self._answer_packed(request, nobody)
            elif op == MOVE:
                self._move(parse_moves(request.keys, len(self.layout.trainers)))
            elif self.wire.can_stream(self.codec):
                self._stream(request)
                self.wire.finish_stream()
            else:
                self._answer_rows(request, nobody)
            exchanges += 1

    def stop(self) -> None:
        """End the shards' `serve`; every trainer calls it. It does nothing if no rank is only a shard."""
        if self.layout.trains and self.layout.trainers != self.layout.shards:
            self.wire.exchange_keys(self._make_header(STOP), None)

    def _answer_rows(self, request: KeyRequest, counts: list[int]) -> Tensor:
        """Send the rows that other ranks requested and return the rows [U, D] that this rank requested."""
        table = self._names[request.header.table]
        if self.layout.holds:
            answer = self.local_tables.look_up(table, request.keys, request.header.op == PULL)
        else:
            answer = torch.empty(0, self.specs[table].dim)
        return self.wire.exchange_rows(answer, self.codec, request.counts, counts)

    def _receive_gradients(self, request: KeyRequest, grads: Tensor, counts: list[int]) -> None:
        table = self._names[request.header.table]
        received = self.wire.exchange_rows(grads, self.codec, counts, request.counts)
        if self.layout.holds:
            self.local_tables.apply(table, request.keys, received, request.header.step, request.header.lr)

    def _answer_packed(self, request: KeyRequest, counts: list[int]) -> Tensor:
        table = self._names[request.header.table]
        nothing = torch.empty(0, count_packed_bytes(self.specs[table]), dtype=torch.uint8)
        answer = self.local_tables.take_packed(table, request.keys) if self.layout.holds else nothing
        return self.wire.exchange_bytes(answer, request.counts, counts)

    def _stream(self, request: KeyRequest) -> None:
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
