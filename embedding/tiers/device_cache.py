"""A cache of hot rows and their optimizer state in tensors of a fixed size on a device; the host has the other rows.

A row that a batch in flight needs (pinned, or requested by the current batch) never leaves the device. If no row
may leave, a new row stays on the host, so that no batch reads a wrong row (the problem of FBGEMM's issue 1201).
Rows that no known batch needs leave first, by LFU or LRU; then those that are needed last. Only torch operations
touch the device.

`LookAhead` computes which batch needs a key next, as far as the coming batches are known, as Belady's rule
requires. It stores only keys, 8 bytes each, so that a reader may run many batches ahead of the rows. Every
occurrence of a key is linked to its next one when that becomes known; a batch takes one index lookup, however far
ahead it is.
"""

from __future__ import annotations

# Shapes: N keys, U distinct keys, C rows of capacity, D width, S numbers of optimizer state in a row.
import numpy as np
import torch
from torch import Tensor

from nonet.embedding.tables import (
    RowColumns,
    TableSpec,
    get_state_width,
)
from nonet.embedding.tables.optimizers import TableOptimizerSettings, get_row_optimizer
from nonet.embedding.tiers.device_optimizer import apply_step, sum_gradients
from nonet.embedding.tiers.slot_index import SlotIndex
from nonet.errors import ConfigError
from nonet.random import rng

# Shapes: N distinct keys of a batch.


POLICIES = ("lfu", "lru")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SAMPLE = 32  # Candidates per victim, if there are more.
_AGE = 16  # Uses are halved after this many per row of capacity.
_PINNED = np.iinfo(np.int64).max
_FORESEEN = 1 << 62


def count_device_row_bytes(spec: TableSpec) -> int:
    """Compute the bytes of a row and its state on the device."""
    return _DTYPES[spec.dtype].itemsize * spec.dim + 4 * get_state_width(spec)


class DeviceCache:
    """A HotRows tier of `rows` rows in torch tensors on `device`."""

    def __init__(
        self, spec: TableSpec, rows: int, *, device: str = "cpu", policy: str = "lfu", seed: int = 0
    ):
        if policy not in POLICIES or rows < 1:
            raise ConfigError(
                f"a device cache needs at least 1 row and the policy lfu or lru, got {rows} and {policy!r}"
            )
        self.spec, self.capacity, self.policy = spec, rows, policy
        self.device = torch.device(device)
        self._optimizer = get_row_optimizer(spec.optimizer)
        self._eps = self._optimizer.eps if spec.eps is None else spec.eps
        self._rows = torch.zeros(rows, spec.dim, dtype=_DTYPES[spec.dtype], device=self.device)
        self._state = torch.zeros(rows, get_state_width(spec), device=self.device)
        self._seed, self._draws = seed, 0
        self.clear()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def keys(self) -> np.ndarray:
        """The keys of the cached rows, in the order of their slots."""
        return self._key[self._held]

    @property
    def nbytes(self) -> int:
        """The bytes on the device, independent of how many rows are cached."""
        return self.capacity * count_device_row_bytes(self.spec)

    def clear(self) -> None:
        """Remove every row and every announced batch."""
        room = self.capacity
        self._index, self._ahead = SlotIndex("device-cache"), LookAhead()
        self._key, self._step, self._uses, self._last = (np.zeros(room, np.int64) for _ in range(4))
        self._next = np.full(room, NEVER)
        self._pins = np.zeros(room, np.int32)
        self._held, self._dirty = (np.zeros(room, bool) for _ in range(2))
        self._pinned: dict[int, list[np.ndarray]] = {}
        self._free, self._free_count = np.arange(room)[::-1].copy(), room
        self._clock, self._used = 0, 0

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Return which keys [N] are cached, as bool [N]."""
        return self._index.find(keys) >= 0

    def lookup(self, keys: np.ndarray, *, train: bool) -> Tensor:
        """Return a copy of the rows [N, D] of cached keys [N]; with `train` they stay until the next such call."""
        slots = self._index.find(keys)
        if train:
            distinct = np.unique(slots)
            self._clock += 1
            self._last[distinct] = self._clock
            self._uses[distinct] += 1
            self._halve_uses(len(distinct))
        return self._rows.index_select(0, self._to_device(slots)).float()

    def apply(self, keys: np.ndarray, grads: Tensor, step: int, lr: float) -> None:
        """Sum the gradients of equal keys in position order, then apply one optimizer step to each row.

        Args:
            keys: Keys that are all cached [N].
            grads: Gradients [N, D].
            step: The step.
            lr: The learning rate.
        """
        slots, inverse = np.unique(self._index.find(keys), return_inverse=True)
        at, spec = self._to_device(slots), self.spec
        grads = grads.detach().to(self.device, torch.float32)
        total = sum_gradients(grads, self._to_device(inverse.astype(np.int64)), len(slots))
        rows, state = self._rows.index_select(0, at).float(), self._state.index_select(0, at)
        numbers = TableOptimizerSettings(lr, self._eps, spec.weight_decay, spec.clip, spec.l1, spec.l2)
        apply_step(self._optimizer, rows, state, total, numbers)
        self._rows.index_copy_(0, at, rows.to(self._rows.dtype))
        self._state.index_copy_(0, at, state)
        self._dirty[slots], self._step[slots] = True, step

    def admit(self, rows: RowColumns) -> RowColumns:
        """Add as many of these distinct rows, none of them cached, as fit, and return the displaced changed rows."""
        slots, gone = self._make_room(len(rows.key))
        fresh = slice(0, len(slots))
        self._write_rows(slots, rows.row[fresh], rows.state[fresh])
        self._index.put(rows.key[fresh], slots)
        self._key[slots], self._step[slots] = rows.key[fresh], rows.step[fresh]
        self._held[slots], self._dirty[slots], self._pins[slots] = True, False, 0
        self._uses[slots], self._last[slots], self._next[slots] = 1, self._clock, NEVER
        return gone

    def pin(self, step: int, keys: np.ndarray) -> None:
        """Keep those rows of these distinct keys that are cached until `release` of this step."""
        slots = self._index.find(keys)
        present = slots >= 0
        self._pins[slots[present]] += 1
        self._next[slots[present]] = np.minimum(self._next[slots[present]], step)
        self._pinned.setdefault(step, []).append(keys[present])

    def announce_batch(self, step: int, keys: np.ndarray) -> None:
        """Announce that the batch of `step` will need these distinct keys; steps at or before the last are ignored."""
        if step > self._ahead.last:
            self._ahead.add_batch(step, keys)
            slots = self._index.find(keys)
            slots = slots[slots >= 0]
            self._next[slots] = np.minimum(self._next[slots], step)

    def release(self, step: int) -> None:
        """Mark the batches up to `step` as finished: remove their pins and update the next use of their rows."""
        for past in [pinned for pinned in self._pinned if pinned <= step]:
            for keys in self._pinned.pop(past):
                slots = self._index.find(keys)
                slots = slots[slots >= 0]
                self._pins[slots] = np.maximum(self._pins[slots] - 1, 0)
                self._next[slots] = np.where(self._next[slots] <= step, NEVER, self._next[slots])
        for keys, follows in self._ahead.pop_batches(step):
            slots = self._index.find(keys)
            self._next[slots[slots >= 0]] = follows[slots >= 0]

    def pop_dirty(self, keys: np.ndarray | None = None) -> RowColumns:
        """Return copies of the changed rows (of these keys) and mark them as unchanged."""
        if keys is None:
            slots = np.flatnonzero(self._dirty)
        else:
            slots = np.unique(self._index.find(keys))
            slots = slots[slots >= 0]
            slots = slots[self._dirty[slots]]
        return self._copy_rows(slots)

    def overwrite(self, rows: RowColumns) -> None:
        """Replace the values of those of these rows that are cached, and mark them as unchanged."""
        slots = self._index.find(rows.key)
        here = rows.select(slots >= 0)
        slots = slots[slots >= 0]
        self._write_rows(slots, here.row, here.state)
        self._step[slots], self._dirty[slots] = here.step, False

    def drop(self, keys: np.ndarray) -> None:
        """Remove the rows of these keys, changed or not."""
        slots = self._index.find(keys)
        slots = slots[slots >= 0]
        self._release_slots(np.unique(slots))

    def _make_room(self, count: int) -> tuple[np.ndarray, RowColumns]:
        """Free up to `count` slots; return them and the changed rows that were in them."""
        short = count - self._free_count
        victims = self._select_victims(short) if short > 0 else np.empty(0, np.int64)
        gone = self._copy_rows(victims[self._dirty[victims]])
        self._release_slots(victims)
        count = min(count, self._free_count)
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].copy(), gone

    def _select_victims(self, count: int) -> np.ndarray:
        """Select the slots of at most `count` evictable rows with the lowest priority."""
        if _SAMPLE * count < self.capacity:
            self._draws += 1
            source = rng(self._seed, "device-cache", self._draws)
            sample = np.unique(source.integers(0, self.capacity, _SAMPLE * count))
            slots = self._select_lowest(sample, count)
            if len(slots) == count:
                return slots
        return self._select_lowest(np.arange(self.capacity), count)

    def _select_lowest(self, slots: np.ndarray, count: int) -> np.ndarray:
        """Select from `slots` at most `count` evictable ones with the lowest priority."""
        worth = self._compute_priority(slots)
        count = min(count, int((worth != _PINNED).sum()))
        return slots[np.argpartition(worth, count - 1)[:count]] if count else slots[:0]

    def _compute_priority(self, slots: np.ndarray) -> np.ndarray:
        """Compute the priority of rows, int64 [N]: needed soon, then used often or recently."""
        follows = self._next[slots]
        known = self._uses[slots] << 32 | self._last[slots] if self.policy == "lfu" else self._last[slots]
        worth = np.where(follows == NEVER, known, _FORESEEN - follows)
        pinned = (self._pins[slots] > 0) | (self._last[slots] == self._clock) | ~self._held[slots]
        return np.where(pinned, _PINNED, worth)

    def _halve_uses(self, uses: int) -> None:
        """Halve all use counts after a number of uses that is proportional to the capacity."""
        self._used += uses
        if self._used > _AGE * self.capacity:
            self._uses >>= 1
            self._used = 0

    def _copy_rows(self, slots: np.ndarray) -> RowColumns:
        """Copy the rows in these slots to the host and mark them as unchanged."""
        self._dirty[slots] = False
        at = self._to_device(slots)
        row, state = (
            tensor.index_select(0, at).float().cpu().numpy() for tensor in (self._rows, self._state)
        )
        return RowColumns(self._key[slots], row, state, self._step[slots], np.zeros(len(slots), bool))

    def _release_slots(self, slots: np.ndarray) -> None:
        """Free these slots."""
        self._index.drop(self._key[slots])
        self._held[slots], self._dirty[slots], self._pins[slots] = False, False, 0
        self._next[slots] = NEVER
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def _write_rows(self, slots: np.ndarray, row: np.ndarray, state: np.ndarray) -> None:
        at = self._to_device(slots)
        for target, values in ((self._rows, row), (self._state, state)):
            fresh = torch.from_numpy(np.require(values, requirements=["C", "W"]))
            target.index_copy_(0, at, fresh.to(self.device).to(target.dtype))

    def _to_device(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)


NEVER = np.iinfo(np.int64).max


class LookAhead:
    """The next use of every key in the coming batches, which are announced and finished in order of their steps."""

    def __init__(self) -> None:
        self._latest = SlotIndex("look-ahead")  # Key -> number of its latest occurrence.
        self._next = np.empty(
            0, dtype=np.int64
        )  # For each occurrence since _first, the step of the key's next one.
        self._first = 0
        self._batches: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> int:
        """The last announced step, -1 before the first."""
        return next(reversed(self._batches), -1)

    def add_batch(self, step: int, keys: np.ndarray) -> None:
        """Announce that the batch of `step`, later than all before, needs these distinct keys [N]."""
        before = self._latest.find(keys)
        self._next[before[before >= 0] - self._first] = step
        start = self._first + len(self._next)
        self._latest.put(keys, np.arange(start, start + len(keys)))
        self._next = np.concatenate([self._next, np.full(len(keys), NEVER)])
        self._batches[step] = keys

    def pop_batches(self, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for every batch up to `step` its keys and the step that needs each next, NEVER if unknown."""
        batches = []
        for past in [known for known in self._batches if known <= step]:
            keys = self._batches.pop(past)
            follows, self._next = self._next[: len(keys)].copy(), self._next[len(keys) :]
            self._first += len(keys)
            self._latest.drop(keys[follows == NEVER])
            batches.append((keys, follows))
        return batches
