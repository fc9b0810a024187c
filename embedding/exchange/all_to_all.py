"""The exchanges of a sparse world: keys with a header to their owners, then rows or gradients.

An exchange takes two all-to-alls instead of four for header, counts, keys and rows: a block of fixed length carries
the header, the count and the keys (`key_blocks.py`). Keys that do not fit follow in one more all-to-all. Buffers are
reused between exchanges. Ranks that are all on one machine can exchange through shared memory (`shared_memory.py`).
The process group's timeout limits every wait; WorkerLost names the ranks that are missing.
"""

# Shapes: W ranks, U keys of this rank, M keys requested from this rank, D width, B bytes per row in transit.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nonet.embedding.exchange.codecs import Codec
from nonet.embedding.exchange.connection import connect
from nonet.embedding.exchange.header import (
    COUNT,
    MORE,
    PULL,
    READ,
    SAME,
    WORDS,
    ExchangeHeader,
    check_agreement,
)
from nonet.embedding.exchange.key_blocks import BlockCapacity, fill_blocks, split_views
from nonet.embedding.exchange.layout import RankLayout, find_missing_ranks
from nonet.embedding.exchange.routes import KeyRoute
from nonet.embedding.exchange.shared_memory import LocalWire
from nonet.errors import WorkerLost

NOTHING = np.empty(0, dtype=np.uint8)
_NO_KEYS = np.empty(0, dtype=np.int64)
Fill = Callable[[Tensor, Callable[[int], None]], None]


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """The request that this rank receives.

    Attributes:
        header: The header that all trainers sent.
        keys: Requested keys in the order of the ranks, int64 [M].
        counts: The number of keys from each rank [W].
    """

    header: ExchangeHeader
    keys: np.ndarray
    counts: list[int]


@dataclass(slots=True)
class ExchangeTraffic:
    """The bytes that this rank sent, including headers and padding, and the number of its collectives."""

    key_bytes: int = 0
    row_bytes: int = 0
    collectives: int = 0


@dataclass(slots=True)
class _GrowingBuffer:
    """A buffer that is reused between exchanges and only grows."""

    data: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of the buffer with this shape and dtype, after growing it if necessary."""
        need = math.prod(shape) * dtype.itemsize
        if need > len(self.data):
            self.data = torch.empty(max(need, 3 * len(self.data) // 2), dtype=torch.uint8)
        return self.data[:need].view(dtype).view(shape)


class Wire:
    """One rank's end of the exchanges; all ranks call `exchange_keys` and then `exchange_rows` in the same order."""

    def __init__(self, layout: RankLayout, group: Any, names: Sequence[str], local: bool = False):
        self._layout, self._group, self._names = layout, group, names
        self._local: LocalWire | None = None
        self._may_be_local = local  # Used once, before the first exchange, in which all ranks take part.
        self._rooms: dict[tuple[int, int], BlockCapacity] = {}
        self._last = (0, 0)
        self._pulled: dict[int, tuple[KeyRequest, np.ndarray]] = {}
        self._nobody = [0] * layout.world
        self._buffers = {name: _GrowingBuffer() for name in ("given", "got", "more", "rows")}
        self.traffic = ExchangeTraffic()

    def exchange_keys(
        self,
        header: ExchangeHeader | None,
        route: KeyRoute | None,
        same: bool = False,
        own: np.ndarray = _NO_KEYS,
        meanwhile: Callable[[], None] | None = None,
    ) -> KeyRequest:
        """Send keys to their owners and receive the keys that other ranks request.

        Args:
            header: The header of this exchange; None on a shard.
            route: The route of the keys; None on a shard.
            same: Whether the keys are those of this rank's last pull of the table.
            own: Keys of the route that this rank looks up itself.
            meanwhile: A function to call while the keys of the other ranks are in transit.

        Returns:
            The request that this rank receives.

        Raises:
            NonetError: If the trainers sent different headers.
            WorkerLost: If a rank is missing or late.
        """
        keys, counts = (_NO_KEYS, self._nobody) if route is None or same else (route.keys, route.counts)
        if len(own):
            keys, counts = self._remove_own(keys, counts)
        room = self._rooms.get(self._last) or BlockCapacity(self._nobody, self._nobody)
        more = any(count > space for count, space in zip(counts, room.given, strict=True))
        outgoing = self._allocate_blocks(sum(room.given) + WORDS * len(room.given))
        fill_blocks(outgoing, header, keys, counts, room.given, (int(same), int(more)))
        blocks = self._exchange_blocks(outgoing, room, meanwhile)
        heads = [block[:WORDS].tolist() for block in blocks]
        settled = check_agreement(
            header, [heads[rank][:COUNT] for rank in self._layout.trainers], self._names
        )
        coming = [head[COUNT] for head in heads]
        parts = [
            block[WORDS : WORDS + min(n, len(block) - WORDS)] for block, n in zip(blocks, coming, strict=True)
        ]
        if any(head[MORE] for head in heads):
            parts = [part.copy() for part in parts]  # The next exchange may overwrite them.
            parts = self._exchange_overflow(parts, coming, keys, counts, room)
        self._rooms[self._last] = room.grow(counts, coming)
        self._last = (settled.op, settled.table)
        return self._make_request(settled, parts, [bool(head[SAME]) for head in heads], own)

    def exchange_rows(
        self,
        given: Tensor,
        codec: Codec,
        given_counts: list[int],
        got_counts: list[int],
        into: Tensor | None = None,
    ) -> Tensor:
        """Send rows [sum(given_counts), D] and receive rows [sum(got_counts), D].

        Args:
            given: Rows to send, in the order of the ranks.
            codec: The codec of the rows in transit.
            given_counts: The number of rows to send to each rank [W].
            got_counts: The number of rows to receive from each rank [W].
            into: The tensor to write to, used only with the fp32 codec.

        Returns:
            The received rows; without `into`, they are valid until the next call.
        """
        dim = given.shape[1]
        exact = codec.name == "fp32"
        sent = given.contiguous() if exact else codec.encode(given)
        shape = (sum(got_counts), sent.shape[1])
        got = self._buffers["rows"].take(shape, sent.dtype) if into is None or not exact else into
        self._exchange(got, sent, got_counts, given_counts)
        return got if exact else codec.decode(got, dim)

    def allocate_rows(self, count: int, dim: int) -> Tensor:
        """Return float32 [count, dim] memory that is valid until the next exchange of rows."""
        return self._buffers["rows"].take((count, dim), torch.float32)

    def can_stream(self, codec: Codec) -> bool:
        """Return whether `stream_rows` and `gather_rows` can be used, which overlap look-ups with the transfer."""
        return codec.name == "fp32" and self._connect_local() is not None

    def stream_rows(self, counts: list[int], dim: int, fill: Fill) -> None:
        """Send every rank its rows, float32 [counts, dim]; `gather_rows` or `finish_stream` must follow.

        Args:
            counts: The number of rows for each rank [W].
            dim: The width of a row.
            fill: A function that writes the rows to the tensor that it gets, and may report at any time how many
                are complete.
        """
        local, width = self._require_local(), 4 * dim
        out = torch.from_numpy(local.get_outgoing(sum(counts) * width).view(np.float32).reshape(-1, dim))
        self._count(out.nbytes, keys=False)
        with self._translate_errors():
            local.announce([count * width for count in counts])
        fill(out, lambda rows: local.publish_bytes(rows * width))

    def gather_rows(self, route: KeyRoute, own: Tensor) -> Tensor:
        """Receive the rows [N, D] of the requested keys; `own` [.., D] are the rows of this rank's own keys."""
        out = torch.empty(len(route.place), own.shape[1])
        with self._translate_errors():
            self._require_local().gather(route.place, route.counts, own, out)
        return out

    def finish_stream(self) -> None:
        """Finish an exchange in which this rank only sends rows."""
        with self._translate_errors():
            self._require_local().finish()

    def exchange_bytes(self, given: Tensor, given_counts: list[int], got_counts: list[int]) -> Tensor:
        """Send and receive opaque rows, uint8 [M, B]."""
        got = torch.empty(sum(got_counts), given.shape[1], dtype=torch.uint8)
        self._exchange(got, given.contiguous(), got_counts, given_counts)
        return got

    def exchange_blobs(self, given: list[np.ndarray]) -> list[np.ndarray]:
        """Send one uint8 array to each rank [W] and receive one from each."""
        sizes = torch.tensor([len(blob) for blob in given], dtype=torch.int64)
        coming = torch.empty_like(sizes)
        every = [1] * self._layout.world
        self._exchange(coming, sizes, every, every)
        got = torch.empty(int(coming.sum()), dtype=torch.uint8)
        self._exchange(got, torch.from_numpy(np.concatenate(given)), coming.tolist(), sizes.tolist())
        return split_views(got.numpy(), coming.tolist())

    def forget_pulls(self) -> None:
        """Forget earlier pulls after the owners of keys have changed, so that no push refers to them."""
        self._pulled.clear()

    def _allocate_blocks(self, words: int) -> np.ndarray:
        """Return int64 [words] memory, which can be sent without a copy if the ranks share memory."""
        local = self._connect_local()
        if local is None:
            return self._buffers["given"].take((words,), torch.int64).numpy()
        return local.get_outgoing(8 * words).view(np.int64)

    def _exchange_blocks(
        self, outgoing: np.ndarray, room: BlockCapacity, meanwhile: Callable[[], None] | None
    ) -> list[np.ndarray]:
        """Exchange the blocks and return those of all ranks, int64; they are valid until the next exchange."""
        sent, came = ([space + WORDS for space in spaces] for spaces in (room.given, room.got))
        local = self._connect_local()
        if local is None:
            got = self._buffers["got"].take((sum(came),), torch.int64)
            self._exchange(got, torch.from_numpy(outgoing), came, sent, meanwhile)
            return split_views(got.numpy(), came)
        self._count(outgoing.nbytes, keys=True)
        with self._translate_errors():
            blocks = local.swap([8 * words for words in sent], meanwhile)
        return [block.view(np.int64) for block in blocks]

    def _count(self, nbytes: int, keys: bool) -> None:
        if keys:
            self.traffic.key_bytes += nbytes
        else:
            self.traffic.row_bytes += nbytes
        self.traffic.collectives += 1

    def _connect_local(self) -> LocalWire | None:
        """Return the shared-memory wire if it is enabled and available; the first call connects it."""
        if self._may_be_local:
            self._may_be_local = False
            with self._translate_errors():
                self._local = connect(self._layout.rank, self._group)
        return self._local

    def _require_local(self) -> LocalWire:
        assert self._local is not None, "ask `can_stream` first"
        return self._local

    def _exchange_overflow(
        self,
        parts: list[np.ndarray],
        coming: list[int],
        keys: np.ndarray,
        counts: list[int],
        room: BlockCapacity,
    ) -> list[np.ndarray]:
        """Exchange the keys that did not fit into the blocks in one more all-to-all."""
        left = [max(count - space, 0) for count, space in zip(counts, room.given, strict=True)]
        late = [max(count - space, 0) for count, space in zip(coming, room.got, strict=True)]
        pieces = zip(split_views(keys, counts), left, strict=True)
        rest = np.concatenate([piece[len(piece) - count :] for piece, count in pieces])
        got = self._buffers["more"].take((sum(late),), torch.int64)
        self._exchange(got, torch.from_numpy(rest), late, left)
        return [np.concatenate(pair) for pair in zip(parts, split_views(got.numpy(), late), strict=True)]

    def _remove_own(self, keys: np.ndarray, counts: list[int]) -> tuple[np.ndarray, list[int]]:
        """Remove this rank's own keys from keys and counts."""
        rank = self._layout.rank
        start = sum(counts[:rank])
        left = np.concatenate([keys[:start], keys[start + counts[rank] :]])
        return left, [0 if other == rank else count for other, count in enumerate(counts)]

    def _make_request(
        self, header: ExchangeHeader, parts: list[np.ndarray], same: list[bool], own: np.ndarray
    ) -> KeyRequest:
        """Build the request from the received parts, using the keys of the last pull for ranks that refer to it."""
        if any(same):
            before, before_own = self._pulled[header.table]
            pulled = split_views(before.keys, before.counts)
            if len(before_own):
                pulled[self._layout.rank] = before_own
            parts = [old if flag else part for old, part, flag in zip(pulled, parts, same, strict=True)]
        request = KeyRequest(header, np.concatenate(parts), [len(part) for part in parts])
        if header.op in (PULL, READ):
            self._pulled[header.table] = request, own
        return request

    def _exchange(
        self,
        got: Tensor,
        sent: Tensor,
        got_counts: list[int],
        sent_counts: list[int],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Run one all-to-all through shared memory or the process group."""
        self._count(sent.nbytes, keys=sent.dtype == torch.int64)
        local = self._connect_local()
        with self._translate_errors():
            if local is not None:
                local.exchange(got, sent, got_counts, sent_counts, meanwhile)
                return
            work = dist.all_to_all_single(
                got, sent, got_counts, sent_counts, group=self._group, async_op=meanwhile is not None
            )
            if meanwhile is not None:
                meanwhile()
                work.wait()  # type: ignore[union-attr]

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert the errors of a collective to WorkerLost."""
        try:
            yield
        except RuntimeError as cause:
            raise self._make_worker_lost(cause) from cause

    def _make_worker_lost(self, cause: RuntimeError) -> WorkerLost:
        """Build a WorkerLost error that names the missing ranks."""
        first_line = str(cause).splitlines()[0]
        missing = find_missing_ranks(self._layout.rank, self._layout.world)
        who = f"; no sign of life from {missing}" if missing else ""
        return WorkerLost(
            f"{self._layout} of the sparse world waited for the other ranks in vain{who}: {first_line}; "
            "one of them is gone or late: restart the whole gang from the last checkpoint"
        )
