"""Sparse rows over ranks: pull rows before a step, push their gradients after it.

All trainers call the same operations in the same order; a shard in `serve` learns from the keys' header what is asked, and a
trainer that differs is an error at once, not a hang. A key travels once a batch however often it occurs. The trainer
sums a key's gradients in position order and the owner sums those in rank order, so any number of shards equals one bit
for bit, a world of one trainer equals a single process bit for bit, and W trainers equal it up to float addition's order.
8,192 keys of width 64 between two processes: `nonet.bench.embedding.wire`.
"""

# Shapes: N keys of one rank, U distinct ones, M keys that one shard receives from all ranks, W ranks, D width.

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
    Header,
    KeyRequest,
    Layout,
    Route,
    Router,
    Wire,
    best_router,
    codec,
    route,
)
from nonet.embedding.tables import (
    NativeTable,
    SparseTable,
    TableSpec,
    int64_keys,
    make_table,
    packed_bytes,
    take_packed,
)
from nonet.embedding.training.resharding import arrive, check_moves, given_rows, leave, moves_of, route_of
from nonet.embedding.versions import History
from nonet.errors import ConfigError, DataError

# Reading rows takes a third of the time of looking them up: who reads them is done soon after the last one is there.
_SHARES, _FEW = (0.75, 0.95, 1.0), 256
MakeTable = Callable[[str, TableSpec, int], SparseTable]


class ShardedTables:
    """This rank's part of the sparse world; `tables` are the rows it holds (none on a rank that only trains).

    `wire` is the codec of rows and gradients between processes (fp32 is exact), `make` builds a table, `router` finds
    distinct keys and their owners; with `local`, ranks that are all on one machine exchange through shared memory. The
    waits' deadline is the process group's timeout.
    """

    def __init__(
        self,
        specs: Mapping[str, TableSpec],
        *,
        seed: int,
        layout: Layout | None = None,
        group: Any = None,
        wire: str = "fp32",
        make: MakeTable = make_table,
        router: Router | None = None,
        slices: SliceMap | None = None,
        local: bool = False,
    ):
        self.specs = dict(specs)
        self.layout = Layout.single() if layout is None else layout
        self.slices = SliceMap(len(self.layout.shards)) if slices is None else slices
        self._group, self._names = group, list(self.specs)
        self.codec, self._router = codec(wire), router or best_router()
        own_specs = self.specs.items() if self.layout.holds else ()
        self.tables: dict[str, Any] = {name: make(name, spec, seed) for name, spec in own_specs}
        self.histories = {name: History(table) for name, table in self.tables.items()}
        self._check()
        self.wire = Wire(self.layout, group, self._names, local)
        self._routes: dict[str, Route] = {}

    @property
    def owned(self) -> range:
        """The slices whose rows this rank holds, when they are one block."""
        return self.slices.slices(self.shard) if self.layout.holds else range(0)

    @property
    def ranges(self) -> list[range]:
        """The blocks of slices whose rows this rank holds."""
        return self.slices.ranges(self.shard) if self.layout.holds else []

    @property
    def shard(self) -> int:
        """This rank's number among the shards."""
        return self.layout.rank - self.layout.shards.start

    def wire_bytes(self, table: str) -> int:
        """Bytes of one row of this table on the wire."""
        return self.codec.row_bytes(self.specs[table].dim)

    def pull(self, table: str, keys: Tensor, *, train: bool = True) -> Tensor:
        """Rows [N, D] of keys [N]; every trainer calls it, maybe with no keys. `train` makes absent rows."""
        number = self._number(table, "pull")
        if self.layout.world == 1:
            return self._lookup(table, int64_keys(keys), train)
        plan = self._routes[table] = self.route(keys)
        header = self._header(PULL if train else READ, number)
        if self.layout.holds and self.codec.name == "fp32":
            return self._pull_fused(table, plan, header)
        request = self.wire.ask(header, plan)
        if self.wire.streams(self.codec):
            self._stream(request)
            return self.wire.gather(plan, torch.empty(0, self.specs[table].dim))
        return plan.spread(self._answer_rows(request, plan.counts))

    def _pull_fused(self, table: str, plan: Route, header: Header) -> Tensor:
        """Rows of this rank's own keys are looked up while the others' keys travel, and never leave the process."""
        rank = self.layout.rank
        start = sum(plan.counts[:rank])
        own = plan.keys[start : start + plan.counts[rank]]
        if self.wire.streams(self.codec):
            mine = self.wire.room(len(own), self.specs[table].dim)
            request = self.wire.ask(
                header, plan, own=own, meanwhile=lambda: self._lookup_into(header, own, mine)
            )
            self._stream(request)
            return self.wire.gather(plan, mine)
        rows = self.wire.room(len(plan.keys), self.specs[table].dim)
        # Own rows stand before the others' where that is the route's order, else after them.
        first, others = start == 0, len(rows) - len(own)
        mine, theirs = (rows[: len(own)], rows[len(own) :]) if first else (rows[others:], rows[:others])
        request = self.wire.ask(header, plan, own=own, meanwhile=lambda: self._lookup_into(header, own, mine))
        counts = [0 if other == rank else count for other, count in enumerate(plan.counts)]
        answer = self._lookup(table, request.keys, header.op == PULL)
        self.wire.rows(answer, self.codec, request.counts, counts, into=theirs)
        return plan.moved(start, len(own), first).spread(rows)

    def push(self, table: str, keys: Tensor, grads: Tensor, step: int, lr: float | None = None) -> None:
        """Apply the gradients [N, D] of keys [N] as one optimizer step; every trainer calls it."""
        number = self._number(table, "push")
        expected = (len(keys), self.specs[table].dim)
        if tuple(grads.shape) != expected:
            raise DataError(f"push to table {table!r} wants gradients {expected}, got {tuple(grads.shape)}")
        if self.layout.world == 1:
            self._apply(table, int64_keys(keys), grads, step, lr)
            return
        plan = self._routes.pop(table, None)
        same = plan is not None and np.array_equal(plan.asked, int64_keys(keys))
        plan = plan if plan is not None and same else self.route(keys)
        request = self.wire.ask(self._header(PUSH, number, step, lr), plan, same)
        self._take_grads(request, plan.reduce(grads.detach().to(torch.float32)), plan.counts)

    def route(self, keys: Tensor) -> Route:
        """Where the keys [N] of a batch go; any thread may ask."""
        layout = self.layout
        return route(int64_keys(keys), self.slices, layout.world, layout.shards.start, self._router)

    def take(self, table: str, plan: Route) -> Tensor:
        """The route's distinct rows with their optimizer state and steps, as bytes [U, B] (`bulk.take_packed`).

        What a pipeline keeps while a batch is in flight. Absent rows are made.
        """
        header = self._header(TAKE, self._number(table, "take"))
        if self.layout.world == 1:
            return self._packed(table, plan.keys)
        return self._answer_packed(self.wire.ask(header, plan), plan.counts)

    def push_summed(self, table: str, plan: Route, grads: Tensor, step: int, lr: float | None = None) -> None:
        """As `push`, of gradients [U, D] that are summed over equal keys already (`Route.reduce`)."""
        header = self._header(PUSH, self._number(table, "push"), step, lr)
        if self.layout.world == 1:
            self._apply(table, plan.keys, grads, step, lr)
            return
        self._take_grads(self.wire.ask(header, plan), grads, plan.counts)

    def move(self, moves: Sequence[SliceMove]) -> None:
        """Move slices between shards; every trainer calls it between steps. See `reshard`."""
        if not self.layout.trains:
            raise ConfigError(f"{self.layout} holds rows and does not train: it calls serve(), not move()")
        check_moves(moves, self.slices)
        if self.layout.world > 1:
            self.wire.ask(self._header(MOVE), route_of(moves, self.layout.shards, self.layout.world))
        self._move(moves)

    def _move(self, moves: Sequence[SliceMove]) -> None:
        """Give, get and forget the rows of these moves, table by table, then go by the map after them."""
        first = self.layout.shards.start
        for name in self._names if self.layout.world > 1 else ():
            by_rank: list[list[SliceMove]] = [[] for _ in range(self.layout.world)]
            for move in moves:
                if self.layout.holds and move.source == self.shard:
                    by_rank[first + move.target].append(move)
            blobs = [given_rows(self.tables[name], some) if some else NOTHING for some in by_rank]
            for rank, blob in enumerate(self.wire.blobs(blobs)):
                if by_rank[rank]:
                    leave(self.histories[name], by_rank[rank])
                if len(blob):
                    arrive(self.histories[name], blob)
        self.slices = self.slices.moved(moves)
        self._routes.clear()
        self.wire.forget()

    def serve(self) -> int:
        """A shard's loop: take part in the trainers' exchanges until they stop; returns their number."""
        if self.layout.trains:
            raise ConfigError(
                f"{self.layout} trains, so it takes part by pull and push; only a shard apart serves"
            )
        exchanges = 0
        nobody = [0] * self.layout.world
        while True:
            request = self.wire.ask(None, None)
            op = request.header.op
            if op == STOP:
                return exchanges
            if op == PUSH:
                dim = self.specs[self._names[request.header.table]].dim
                self._take_grads(request, torch.empty(0, dim), nobody)
            elif op == TAKE:
                self._answer_packed(request, nobody)
            elif op == MOVE:
                self._move(moves_of(request.keys, len(self.layout.trainers)))
            elif self.wire.streams(self.codec):
                self._stream(request)
                self.wire.done()
            else:
                self._answer_rows(request, nobody)
            exchanges += 1

    def stop(self) -> None:
        """Let the shards' `serve` return; every trainer calls it. Nothing to do where no shard is apart."""
        if self.layout.trains and self.layout.trainers != self.layout.shards:
            self.wire.ask(self._header(STOP), None)

    def _answer_rows(self, request: KeyRequest, counts: list[int]) -> Tensor:
        """The rows [U, D] that this rank asked for, having answered what the others asked."""
        table = self._names[request.header.table]
        if self.layout.holds:
            answer = self._lookup(table, request.keys, request.header.op == PULL)
        else:
            answer = torch.empty(0, self.specs[table].dim)
        return self.wire.rows(answer, self.codec, request.counts, counts)

    def _take_grads(self, request: KeyRequest, grads: Tensor, counts: list[int]) -> None:
        table = self._names[request.header.table]
        received = self.wire.rows(grads, self.codec, counts, request.counts)
        if self.layout.holds:
            self._apply(table, request.keys, received, request.header.step, request.header.lr)

    def _answer_packed(self, request: KeyRequest, counts: list[int]) -> Tensor:
        table = self._names[request.header.table]
        nothing = torch.empty(0, packed_bytes(self.specs[table]), dtype=torch.uint8)
        answer = self._packed(table, request.keys) if self.layout.holds else nothing
        return self.wire.bytes_of(answer, request.counts, counts)

    def _packed(self, table: str, keys: np.ndarray) -> Tensor:
        with self.histories[table].making(keys):
            return take_packed(self.tables[table], keys)

    def _lookup(self, table: str, keys: np.ndarray, train: bool) -> Tensor:
        history = self.histories[table]
        with history.making(keys) if train else history.lock:
            rows = self.tables[table].lookup(keys, train=train)
        return rows if self.layout.world == 1 else rows.to("cpu")  # a tier may have them on its device

    def _stream(self, request: KeyRequest) -> None:
        """Send the rows that were asked for, the first ones while later ones are looked up."""

        def fill(rows: Tensor, tell: Callable[[int], None]) -> None:
            if self.layout.holds:
                self._lookup_into(request.header, request.keys, rows, tell)

        self.wire.answer(request.counts, self.specs[self._names[request.header.table]].dim, fill)

    def _lookup_into(
        self, header: Header, keys: np.ndarray, out: Tensor, tell: Callable[[int], None] | None = None
    ) -> None:
        """Rows of keys [M] into `out` [M, D]; `tell` hears how many are there, a few times where they are only read.

        A table knows where the keys of its last training lookup lie, so one that will be trained is looked up whole.
        """
        table, train = self._names[header.table], header.op == PULL
        history, shard_table = self.histories[table], self.tables[table]
        with history.making(keys) if train else history.lock:
            if not isinstance(shard_table, NativeTable):
                out.copy_(shard_table.lookup(keys, train=train))
            elif train or tell is None or len(keys) <= _FEW:
                shard_table.lookup(keys, train=train, out=out)
            else:
                self._read_in_parts(shard_table, keys, out, tell)
        if tell is not None:
            tell(len(keys))

    def _read_in_parts(
        self, table: NativeTable, keys: np.ndarray, out: Tensor, tell: Callable[[int], None]
    ) -> None:
        start = 0
        for share in _SHARES:
            stop = int(share * len(keys))
            table.lookup(keys[start:stop], train=False, out=out[start:stop])
            tell(stop)
            start = stop

    def _apply(self, table: str, keys: np.ndarray, grads: Tensor, step: int, lr: float | None) -> None:
        with self.histories[table].changing(keys, step):
            self.tables[table].apply(keys, grads, step, lr)

    def _header(self, op: int, table: int = 0, step: int = 0, lr: float | None = None) -> Header:
        return Header(op, table, step, lr, self.slices.version)

    def _number(self, table: str, verb: str) -> int:
        if not self.layout.trains:
            raise ConfigError(f"{self.layout} holds rows and does not train: it calls serve(), not {verb}()")
        if table not in self.specs:
            raise ConfigError(
                f"there is no sparse table {table!r}; there are: {', '.join(self._names) or 'none'}"
            )
        return self._names.index(table)

    def _check(self) -> None:
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
