"""The exchanges between trainers and embedding shards: keys are sent to the shards that own them, then rows or gradients follow.

An exchange takes two all-to-alls instead of four (header, counts, keys, rows), because one block of agreed length has the header,
the count and the keys (`key_blocks.py`). Keys that do not fit follow in one more all-to-all. Buffers are reused between
exchanges. Ranks that are all on one machine can exchange through shared memory (`shared_memory.py`). The timeout of the process
group limits every wait; WorkerLost names the ranks that do not respond.

A pull (PULL or READ) reads rows of a table, a push sends gradients. A push to the keys of the last pull sends a flag instead of
keys.
"""

# Shapes: W ranks (trainers and shards), U keys that this rank sends, M keys that this rank receives, D width, B bytes of an
# encoded row.

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
RowWriter = Callable[[Tensor, Callable[[int], None]], None]


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """The keys that a rank receives in an exchange.

    Attributes:
        header: The header that all trainers sent.
        keys: The received keys in the order of the sending ranks, int64 [M].
        counts: The number of keys from each rank [W].
    """

    header: ExchangeHeader
    keys: np.ndarray
    counts: list[int]


@dataclass(slots=True)
class ExchangeTraffic:
    """The bytes that a rank sent, including headers and padding, and the number of collectives that it took part in."""

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
    """A rank's interface to the exchanges; all ranks must call its methods in the same order, keys first, then rows.

    Args:
        layout: This rank and the ranks of trainers and shards.
        group: The process group of all ranks.
        names: The names of the ranks for error messages.
        local: Whether to use shared memory if all ranks are on one machine.
    """

    def __init__(self, layout: RankLayout, group: Any, names: Sequence[str], local: bool = False):
        self._layout, self._group, self._names = layout, group, names
        self._local: LocalWire | None = None
        self._try_local = local  # Cleared by the first exchange, in which all ranks try to connect.
        self._capacities: dict[tuple[int, int], BlockCapacity] = {}
        self._last_exchange = (0, 0)
        self._pulled: dict[int, tuple[KeyRequest, np.ndarray]] = {}
        self._zero_counts = [0] * layout.world
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
            same: Whether the keys are those of this rank's last pull of the table; they are then not sent again.
            own: Keys of the route that this rank owns and looks up itself; they are not sent.
            meanwhile: A function to call while keys are in transit.

        Returns:
            The keys that the ranks requested from this rank.

        Raises:
            NonetError: If the trainers sent different headers.
            WorkerLost: If a rank does not respond within the timeout.
        """
        keys, counts = (_NO_KEYS, self._zero_counts) if route is None or same else (route.keys, route.counts)
        if len(own):
            keys, counts = self._remove_own(keys, counts)
        capacity = self._capacities.get(self._last_exchange) or BlockCapacity(
            self._zero_counts, self._zero_counts
        )
        more = any(count > space for count, space in zip(counts, capacity.given, strict=True))
        outgoing = self._allocate_blocks(sum(capacity.given) + WORDS * len(capacity.given))
        fill_blocks(outgoing, header, keys, counts, capacity.given, (int(same), int(more)))
        blocks = self._exchange_blocks(outgoing, capacity, meanwhile)
        block_headers = [block[:WORDS].tolist() for block in blocks]
        agreed_header = check_agreement(
            header, [block_headers[rank][:COUNT] for rank in self._layout.trainers], self._names
        )
        incoming = [block_header[COUNT] for block_header in block_headers]
        parts = [
            block[WORDS : WORDS + min(n, len(block) - WORDS)]
            for block, n in zip(blocks, incoming, strict=True)
        ]
        if any(block_header[MORE] for block_header in block_headers):
            parts = [part.copy() for part in parts]  # The next exchange may overwrite them.
            parts = self._exchange_overflow(parts, incoming, keys, counts, capacity)
        self._capacities[self._last_exchange] = capacity.grow(counts, incoming)
        self._last_exchange = (agreed_header.op, agreed_header.table)
        return self._make_request(
            agreed_header, parts, [bool(block_header[SAME]) for block_header in block_headers], own
        )

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
            codec: The codec that encodes the rows for the transfer.
            given_counts: The number of rows to send to each rank [W].
            got_counts: The number of rows to receive from each rank [W].
            into: A float32 tensor for the received rows; ignored unless the codec is fp32.

        Returns:
            The received rows, float32. If they are not in `into` and the codec is fp32, the next call overwrites them.
        """
        dim = given.shape[1]
        exact = codec.name == "fp32"
        sent = given.contiguous() if exact else codec.encode(given)
        shape = (sum(got_counts), sent.shape[1])
        got = self._buffers["rows"].take(shape, sent.dtype) if into is None or not exact else into
        self._exchange(got, sent, got_counts, given_counts)
        return got if exact else codec.decode(got, dim)

    def allocate_rows(self, count: int, dim: int) -> Tensor:
        """Return uninitialised float32 memory [count, dim] that is valid until the next exchange of rows."""
        return self._buffers["rows"].take((count, dim), torch.float32)

    def can_stream(self, codec: Codec) -> bool:
        """Return whether `stream_rows` and `gather_rows` can be used, which overlap look-ups with the transfer."""
        return codec.name == "fp32" and self._connect_local() is not None

    def stream_rows(self, counts: list[int], dim: int, fill: RowWriter) -> None:
        """Write rows and send them to the ranks while they are written; `gather_rows` or `finish_stream` must follow.

        Args:
            counts: The number of rows for each rank [W].
            dim: The width of a row.
            fill: A function that writes the rows to its first argument, float32 [sum(counts), dim], and can call its second
                argument with the number of rows that are complete.
        """
        local, width = self._require_local(), 4 * dim
        out = torch.from_numpy(local.get_outgoing(sum(counts) * width).view(np.float32).reshape(-1, dim))
        self._count(out.nbytes, keys=False)
        with self._translate_errors():
            local.announce([count * width for count in counts])
        fill(out, lambda rows: local.publish_bytes(rows * width))

    def gather_rows(self, route: KeyRoute, own: Tensor) -> Tensor:
        """Receive the rows of requested keys, one per position of the batch.

        Args:
            route: The route of the requested keys.
            own: The rows [.., D] of the keys that this rank looked up itself.

        Returns:
            Rows, float32 [N, D].
        """
        out = torch.empty(len(route.place), own.shape[1])
        with self._translate_errors():
            self._require_local().gather(route.place, route.counts, own, out)
        return out

    def finish_stream(self) -> None:
        """Finish an exchange in which this rank only sends rows."""
        with self._translate_errors():
            self._require_local().finish()

    def exchange_bytes(self, given: Tensor, given_counts: list[int], got_counts: list[int]) -> Tensor:
        """Send rows of bytes, uint8 [sum(given_counts), B], and receive uint8 [sum(got_counts), B]."""
        got = torch.empty(sum(got_counts), given.shape[1], dtype=torch.uint8)
        self._exchange(got, given.contiguous(), got_counts, given_counts)
        return got

    def exchange_blobs(self, given: list[np.ndarray]) -> list[np.ndarray]:
        """Send one uint8 array to each rank [W] and receive one from each."""
        sizes = torch.tensor([len(blob) for blob in given], dtype=torch.int64)
        incoming = torch.empty_like(sizes)
        one_each = [1] * self._layout.world
        self._exchange(incoming, sizes, one_each, one_each)
        got = torch.empty(int(incoming.sum()), dtype=torch.uint8)
        self._exchange(got, torch.from_numpy(np.concatenate(given)), incoming.tolist(), sizes.tolist())
        return split_views(got.numpy(), incoming.tolist())

    def forget_pulls(self) -> None:
        """Forget earlier pulls, so that no push refers to them; call it when the owners of keys have changed."""
        self._pulled.clear()

    def _allocate_blocks(self, words: int) -> np.ndarray:
        """Return int64 memory [words] for outgoing blocks: shared memory if it is used, else a reused buffer."""
        local = self._connect_local()
        if local is None:
            return self._buffers["given"].take((words,), torch.int64).numpy()
        return local.get_outgoing(8 * words).view(np.int64)

    def _exchange_blocks(
        self, outgoing: np.ndarray, capacity: BlockCapacity, meanwhile: Callable[[], None] | None
    ) -> list[np.ndarray]:
        """Exchange blocks and return the received ones by rank, int64; they are valid until the next exchange."""
        sent_words, got_words = (
            [keys + WORDS for keys in spaces] for spaces in (capacity.given, capacity.got)
        )
        local = self._connect_local()
        if local is None:
            got = self._buffers["got"].take((sum(got_words),), torch.int64)
            self._exchange(got, torch.from_numpy(outgoing), got_words, sent_words, meanwhile)
            return split_views(got.numpy(), got_words)
        self._count(outgoing.nbytes, keys=True)
        with self._translate_errors():
            blocks = local.swap([8 * words for words in sent_words], meanwhile)
        return [block.view(np.int64) for block in blocks]

    def _count(self, nbytes: int, keys: bool) -> None:
        """Count one collective and its bytes, as bytes of keys or of rows."""
        if keys:
            self.traffic.key_bytes += nbytes
        else:
            self.traffic.row_bytes += nbytes
        self.traffic.collectives += 1

    def _connect_local(self) -> LocalWire | None:
        """Return the shared-memory connection, or None if it is disabled or unavailable; the first call connects all ranks."""
        if self._try_local:
            self._try_local = False
            with self._translate_errors():
                self._local = connect(self._layout.rank, self._group)
        return self._local

    def _require_local(self) -> LocalWire:
        assert self._local is not None, "call this only if `can_stream` returns True"
        return self._local

    def _exchange_overflow(
        self,
        parts: list[np.ndarray],
        incoming: list[int],
        keys: np.ndarray,
        counts: list[int],
        capacity: BlockCapacity,
    ) -> list[np.ndarray]:
        """Exchange the keys that did not fit into the blocks in one more all-to-all."""
        unsent = [max(count - space, 0) for count, space in zip(counts, capacity.given, strict=True)]
        missing = [max(count - space, 0) for count, space in zip(incoming, capacity.got, strict=True)]
        pieces = zip(split_views(keys, counts), unsent, strict=True)
        overflow = np.concatenate([piece[len(piece) - count :] for piece, count in pieces])
        got = self._buffers["more"].take((sum(missing),), torch.int64)
        self._exchange(got, torch.from_numpy(overflow), missing, unsent)
        return [np.concatenate(pair) for pair in zip(parts, split_views(got.numpy(), missing), strict=True)]

    def _remove_own(self, keys: np.ndarray, counts: list[int]) -> tuple[np.ndarray, list[int]]:
        """Return keys and counts without the keys that this rank sends to itself."""
        rank = self._layout.rank
        start = sum(counts[:rank])
        other_keys = np.concatenate([keys[:start], keys[start + counts[rank] :]])
        return other_keys, [0 if other == rank else count for other, count in enumerate(counts)]

    def _make_request(
        self, header: ExchangeHeader, parts: list[np.ndarray], same: list[bool], own: np.ndarray
    ) -> KeyRequest:
        """Build the request from the received keys by rank; ranks with `same` get the keys of their last pull of the table."""
        if any(same):
            before, before_own = self._pulled[header.table]
            pulled = split_views(before.keys, before.counts)
            if len(before_own):
                pulled[self._layout.rank] = before_own
            parts = [
                earlier if is_same else part
                for earlier, part, is_same in zip(pulled, parts, same, strict=True)
            ]
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
        """Convert the RuntimeError of a collective to WorkerLost."""
        try:
            yield
        except RuntimeError as cause:
            raise self._make_worker_lost(cause) from cause

    def _make_worker_lost(self, cause: RuntimeError) -> WorkerLost:
        """Build a WorkerLost error that names the ranks that do not respond."""
        first_line = str(cause).splitlines()[0]
        missing = find_missing_ranks(self._layout.rank, self._layout.world)
        missing_text = f" (no response from {missing})" if missing else ""
        return WorkerLost(
            f"{self._layout} of the sparse world failed to exchange with the other ranks{missing_text}: {first_line}; "
            "one of them has ended or is late. Restart all ranks from the last checkpoint."
        )
