"""The exchanges between trainers and embedding shards: keys are sent to the shards that own them, then rows or gradients follow.

An exchange takes two all-to-alls instead of four (header, counts, keys, rows), because one block of agreed length contains
the header, the count and the keys (`key_blocks.py`). Keys that do not fit follow in one more all-to-all. Buffers are reused
between exchanges. Ranks that are all on one machine can exchange through shared memory (`shared_memory.py`). The timeout of
the process group limits every wait; WorkerLost names the ranks that do not respond.

A pull (PULL or READ) reads rows of a table, a push sends gradients. A push to the keys of the last pull sends a flag instead
of keys.
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
    BLOCK_WORDS,
    COUNT_WORD,
    MORE_WORD,
    PULL,
    READ,
    SAME_WORD,
    ExchangeHeader,
    check_agreement,
)
from nonet.embedding.exchange.key_blocks import BlockCapacity, fill_blocks, split_views
from nonet.embedding.exchange.layout import RankLayout, find_missing_ranks
from nonet.embedding.exchange.routes import KeyRoute
from nonet.embedding.exchange.shared_memory import LocalWire
from nonet.errors import WorkerLost

NO_BYTES = np.empty(0, dtype=np.uint8)  # What `exchange_blobs` sends to a rank that gets nothing.
_NO_KEYS = np.empty(0, dtype=np.int64)
# (memory for the rows, function that gets the number of complete rows): the `fill` of `Wire.stream_rows`.
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
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > len(self.data):  # Growing by at least a half keeps the number of allocations low.
            self.data = torch.empty(max(nbytes, 3 * len(self.data) // 2), dtype=torch.uint8)
        return self.data[:nbytes].view(dtype).view(shape)


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
        # The (operation, table) of an exchange is unknown until its blocks arrive, so both ends choose the length of the
        # blocks by the (operation, table) of the exchange before it.
        self._last_exchange = (0, 0)
        self._capacities: dict[tuple[int, int], BlockCapacity] = {}
        # By table number: the request of the last pull, and the keys that this rank looked up itself in it.
        self._last_pulls: dict[int, tuple[KeyRequest, np.ndarray]] = {}
        self._zero_counts = [0] * layout.world
        self._buffers = {name: _GrowingBuffer() for name in ("given", "got", "more", "rows")}
        self.traffic = ExchangeTraffic()

    def exchange_keys(
        self,
        header: ExchangeHeader | None,
        route: KeyRoute | None,
        same_keys: bool = False,
        own_keys: np.ndarray = _NO_KEYS,
        meanwhile: Callable[[], None] | None = None,
    ) -> KeyRequest:
        """Send keys to their owners and receive the keys that other ranks request.

        Args:
            header: The header of this exchange; None on a shard.
            route: The route of the keys; None on a shard.
            same_keys: Whether the keys are those of this rank's last pull of the table; they are then not sent again.
            own_keys: The keys of the route that this rank owns and looks up itself, int64; they are not sent.
            meanwhile: A function to call while keys are in transit.

        Returns:
            The header that all trainers sent and the keys that the ranks requested from this rank.

        Raises:
            NonetError: If the trainers sent different headers.
            WorkerLost: If a rank does not respond within the timeout.
        """
        keys, counts = (
            (_NO_KEYS, self._zero_counts) if route is None or same_keys else (route.keys, route.counts)
        )
        if len(own_keys):
            keys, counts = self._remove_own(keys, counts)
        capacity = self._capacities.get(self._last_exchange) or BlockCapacity(
            self._zero_counts, self._zero_counts
        )
        overflows = any(count > space for count, space in zip(counts, capacity.given, strict=True))
        outgoing = self._allocate_blocks(sum(capacity.given) + BLOCK_WORDS * len(capacity.given))
        fill_blocks(outgoing, header, keys, counts, capacity.given, (int(same_keys), int(overflows)))
        blocks = self._exchange_blocks(outgoing, capacity, meanwhile)
        block_headers = [block[:BLOCK_WORDS].tolist() for block in blocks]
        agreed_header = check_agreement(
            header, [block_headers[rank][:COUNT_WORD] for rank in self._layout.trainers], self._names
        )
        incoming_counts = [block_header[COUNT_WORD] for block_header in block_headers]
        received_keys = [
            block[BLOCK_WORDS : BLOCK_WORDS + min(count, len(block) - BLOCK_WORDS)]
            for block, count in zip(blocks, incoming_counts, strict=True)
        ]
        if any(block_header[MORE_WORD] for block_header in block_headers):
            # The overflow exchange may overwrite the blocks.
            received_keys = [part.copy() for part in received_keys]
            received_keys = self._exchange_overflow(received_keys, incoming_counts, keys, counts, capacity)
        self._capacities[self._last_exchange] = capacity.grow(counts, incoming_counts)
        self._last_exchange = (agreed_header.op, agreed_header.table)
        return self._make_request(
            agreed_header,
            received_keys,
            [bool(block_header[SAME_WORD]) for block_header in block_headers],
            own_keys,
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
        is_fp32 = codec.name == "fp32"  # Rows are then sent and received without encoding.
        sent = given.contiguous() if is_fp32 else codec.encode(given)
        shape = (sum(got_counts), sent.shape[1])
        got = self._buffers["rows"].take(shape, sent.dtype) if into is None or not is_fp32 else into
        self._exchange(got, sent, got_counts, given_counts)
        return got if is_fp32 else codec.decode(got, dim)

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
        local, row_bytes = self._require_local(), 4 * dim  # float32
        out = torch.from_numpy(local.get_outgoing(sum(counts) * row_bytes).view(np.float32).reshape(-1, dim))
        self._count_traffic(out.nbytes, keys=False)
        with self._translate_errors():
            local.announce([count * row_bytes for count in counts])
        fill(out, lambda row_count: local.publish_bytes(row_count * row_bytes))

    def gather_rows(self, route: KeyRoute, own_rows: Tensor) -> Tensor:
        """Receive the rows of requested keys, one per position of the batch.

        Args:
            route: The route of the requested keys.
            own_rows: The rows of the keys that this rank looked up itself, float32 [own_rows keys, D].

        Returns:
            The rows of the N positions of the batch, float32 [N, D].
        """
        out = torch.empty(len(route.place), own_rows.shape[1])
        with self._translate_errors():
            self._require_local().gather(route.place, route.counts, own_rows, out)
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
        # The first exchange sends the sizes, the second one the bytes.
        sent_sizes = torch.tensor([len(blob) for blob in given], dtype=torch.int64)
        got_sizes = torch.empty_like(sent_sizes)
        one_each = [1] * self._layout.world
        self._exchange(got_sizes, sent_sizes, one_each, one_each)
        got = torch.empty(int(got_sizes.sum()), dtype=torch.uint8)
        self._exchange(got, torch.from_numpy(np.concatenate(given)), got_sizes.tolist(), sent_sizes.tolist())
        return split_views(got.numpy(), got_sizes.tolist())

    def forget_pulls(self) -> None:
        """Forget earlier pulls, so that no push refers to them; call it when the owners of keys have changed."""
        self._last_pulls.clear()

    def _allocate_blocks(self, words: int) -> np.ndarray:
        """Return memory, int64 [words], for outgoing blocks: shared memory if it is used, else a reused buffer."""
        local = self._connect_local()
        if local is None:
            return self._buffers["given"].take((words,), torch.int64).numpy()
        return local.get_outgoing(8 * words).view(np.int64)  # 8 bytes per int64.

    def _exchange_blocks(
        self, outgoing: np.ndarray, capacity: BlockCapacity, meanwhile: Callable[[], None] | None
    ) -> list[np.ndarray]:
        """Exchange blocks and return the received ones [W], int64, which are valid until the next exchange.

        `outgoing` has the blocks for all ranks one after the other. `meanwhile` is called while they are in transit.
        """
        sent_words, got_words = (
            [key_count + BLOCK_WORDS for key_count in key_counts]
            for key_counts in (capacity.given, capacity.got)
        )
        local = self._connect_local()
        if local is None:
            got = self._buffers["got"].take((sum(got_words),), torch.int64)
            self._exchange(got, torch.from_numpy(outgoing), got_words, sent_words, meanwhile)
            return split_views(got.numpy(), got_words)
        self._count_traffic(outgoing.nbytes, keys=True)
        with self._translate_errors():
            blocks = local.swap([8 * words for words in sent_words], meanwhile)
        return [block.view(np.int64) for block in blocks]

    def _count_traffic(self, nbytes: int, keys: bool) -> None:
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
        received_keys: list[np.ndarray],
        incoming_counts: list[int],
        keys: np.ndarray,
        counts: list[int],
        capacity: BlockCapacity,
    ) -> list[np.ndarray]:
        """Exchange the keys that did not fit into the blocks, and return all received keys by rank [W].

        Args:
            received_keys: The keys that came in the blocks, by rank [W].
            incoming_counts: The number of keys that each rank sends in total [W].
            keys: The keys that this rank sends, in the order of the ranks, int64 [U].
            counts: The number of keys for each rank [W].
            capacity: The number of keys that fitted into the blocks.
        """
        unsent = [max(count - space, 0) for count, space in zip(counts, capacity.given, strict=True)]
        missing = [max(count - space, 0) for count, space in zip(incoming_counts, capacity.got, strict=True)]
        keys_and_unsent = zip(split_views(keys, counts), unsent, strict=True)
        overflow = np.concatenate([part[len(part) - count :] for part, count in keys_and_unsent])
        got = self._buffers["more"].take((sum(missing),), torch.int64)
        self._exchange(got, torch.from_numpy(overflow), missing, unsent)
        overflow_by_rank = split_views(got.numpy(), missing)
        return [np.concatenate(pair) for pair in zip(received_keys, overflow_by_rank, strict=True)]

    def _remove_own(self, keys: np.ndarray, counts: list[int]) -> tuple[np.ndarray, list[int]]:
        """Return `keys` and their `counts` by rank [W] without the keys whose owner is this rank."""
        rank = self._layout.rank
        start = sum(counts[:rank])
        other_keys = np.concatenate([keys[:start], keys[start + counts[rank] :]])
        return other_keys, [0 if other == rank else count for other, count in enumerate(counts)]

    def _make_request(
        self, header: ExchangeHeader, keys_by_rank: list[np.ndarray], same: list[bool], own_keys: np.ndarray
    ) -> KeyRequest:
        """Build the request of an exchange, and store it if it is a pull.

        Args:
            header: The header that all trainers sent.
            keys_by_rank: The keys that came from each rank [W].
            same: Whether each rank sent a flag instead of the keys of its last pull of the table [W].
            own_keys: The keys that this rank looks up itself and has not sent.
        """
        if any(same):
            last_pull, last_own_keys = self._last_pulls[header.table]
            pulled_by_rank = split_views(last_pull.keys, last_pull.counts)
            if len(last_own_keys):
                pulled_by_rank[self._layout.rank] = last_own_keys
            keys_by_rank = [
                pulled_keys if is_same else keys
                for pulled_keys, keys, is_same in zip(pulled_by_rank, keys_by_rank, same, strict=True)
            ]
        request = KeyRequest(header, np.concatenate(keys_by_rank), [len(keys) for keys in keys_by_rank])
        if header.op in (PULL, READ):
            self._last_pulls[header.table] = request, own_keys
        return request

    def _exchange(
        self,
        got: Tensor,
        sent: Tensor,
        got_counts: list[int],
        sent_counts: list[int],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Send rows and receive rows into `got` in one all-to-all, through shared memory or the process group."""
        self._count_traffic(sent.nbytes, keys=sent.dtype == torch.int64)
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
        """Convert the RuntimeError of a collective to WorkerLost, which names the ranks that do not respond."""
        try:
            yield
        except RuntimeError as cause:
            first_line = str(cause).splitlines()[0]
            missing = find_missing_ranks(self._layout.rank, self._layout.world)
            missing_text = f" (no response from {missing})" if missing else ""
            raise WorkerLost(
                f"{self._layout} of the sparse world failed to exchange with the other ranks{missing_text}: {first_line}; "
                "one of them has ended or is late. Restart all ranks from the last checkpoint."
            ) from cause
