"""A cache of hot rows and their optimizer state in tensors of a fixed size on a device; other rows are on the host.

A row that a batch in flight needs (it is pinned, or the current batch requests it) is never evicted. If no row can be
evicted, a new row stays on the host, so that no batch reads the row of another key (FBGEMM's issue 1201). Rows that no announced
batch needs are evicted first, by LFU or LRU; then those whose next use is furthest in the future (Belady's rule). The
device is accessed by torch operations only.

`LookAhead` computes the step that uses a key next, as far as the coming batches have been announced. It stores only
keys, 8 bytes each, so a reader may announce many batches ahead. Every occurrence of a key is linked to the next one as
soon as that is announced, so a batch takes one index lookup, independent of how far ahead it is.
"""

# Shapes: N keys, D width. Keys are distinct where a docstring says so.

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.tables import RowColumns, TableSpec, get_state_width
from nonet.embedding.tables.optimizers import TableOptimizerSettings, get_row_optimizer
from nonet.embedding.tiers.device_optimizer import apply_step, sum_gradients
from nonet.embedding.tiers.slot_index import SlotIndex
from nonet.embedding.tiers.tiers import count_device_row_bytes
from nonet.errors import ConfigError
from nonet.random import rng

POLICIES = ("lfu", "lru")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# In large caches, this many random slots per row to evict are the candidates, which saves sorting the whole cache.
_CANDIDATES_PER_ROW = 32
# LFU's use counts are halved after this many uses per row of capacity, so that rows that were popular long ago get evicted.
_USES_PER_ROW = 16
_PINNED = np.iinfo(np.int64).max  # Priority of rows that must not be evicted.
# Rows that an announced batch needs have this priority minus the step of their next use: above every past use.
_ANNOUNCED = 1 << 62


class DeviceCache:
    """A `HotRows` tier in torch tensors on one device.

    Args:
        spec: Spec of the table.
        rows: Capacity in rows.
        device: The torch device.
        policy: "lfu" or "lru", for rows that no announced batch needs.
        seed: Seed of the sampling of eviction candidates.
    """

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
        self._seed, self._draws = seed, 0  # The number of samples that have been drawn.
        self.clear()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def keys(self) -> np.ndarray:
        """The keys of the cached rows, in the order of their slots."""
        return self._key[self._held]

    @property
    def nbytes(self) -> int:
        """The bytes that the cache occupies on the device, independent of the number of cached rows."""
        return self.capacity * count_device_row_bytes(self.spec)

    def clear(self) -> None:
        """Remove every row and every announced batch."""
        capacity = self.capacity
        self._index, self._ahead = SlotIndex("device-cache"), LookAhead()
        # By slot: its key, the step of its last update, its use count, and the value of `_clock` at its last use.
        self._key, self._step, self._uses, self._last = (np.zeros(capacity, np.int64) for _ in range(4))
        self._next = np.full(capacity, NEVER)  # By slot: the step of its next announced use.
        self._pins = np.zeros(capacity, np.int32)  # By slot: the number of its pins.
        # By slot: whether it contains a row, and whether that row has changed on the device.
        self._held, self._dirty = (np.zeros(capacity, bool) for _ in range(2))
        self._pinned: dict[int, list[np.ndarray]] = {}  # The keys that `pin` has protected, by step.
        # The first `_free_count` elements of `_free` are the free slots.
        self._free, self._free_count = np.arange(capacity)[::-1].copy(), capacity
        # The number of training lookups, and the number of uses since the use counts were halved.
        self._clock, self._used = 0, 0

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Return which keys [N] are cached, as bool [N]."""
        return self._index.find(keys) >= 0

    def lookup(self, keys: np.ndarray, *, train: bool) -> Tensor:
        """Return a copy of the rows of cached keys [N], float32 [N, D] on the device.

        With `train`, the rows' uses are counted, and these rows are not evicted before the next call with `train`.
        """
        slots = self._index.find(keys)
        if train:
            distinct = np.unique(slots)
            self._clock += 1
            self._last[distinct] = self._clock
            self._uses[distinct] += 1
            self._count_uses(len(distinct))
        return self._rows.index_select(0, self._to_device(slots)).float()

    def apply(self, keys: np.ndarray, grads: Tensor, step: int, lr: float) -> None:
        """Sum the gradients of equal keys in position order, then apply one optimizer step to each row.

        Args:
            keys: Keys [N], all of which are cached.
            grads: Gradients [N, D].
            step: The training step.
            lr: The learning rate.
        """
        slots, inverse = np.unique(self._index.find(keys), return_inverse=True)
        device_slots, spec = self._to_device(slots), self.spec
        grads = grads.detach().to(self.device, torch.float32)
        summed_grads = sum_gradients(grads, self._to_device(inverse.astype(np.int64)), len(slots))
        rows = self._rows.index_select(0, device_slots).float()
        state = self._state.index_select(0, device_slots)
        settings = TableOptimizerSettings(lr, self._eps, spec.weight_decay, spec.clip, spec.l1, spec.l2)
        apply_step(
            self._optimizer, rows, state, summed_grads, settings
        )  # This changes rows and state in place.
        self._rows.index_copy_(0, device_slots, rows.to(self._rows.dtype))
        self._state.index_copy_(0, device_slots, state)
        self._dirty[slots], self._step[slots] = True, step

    def admit(self, rows: RowColumns) -> RowColumns:
        """Add rows of distinct keys that are not cached; if not all fit, only the first ones.

        Returns:
            The rows that were evicted for them and had changed on the device, so that the caller writes them to the host.
        """
        slots, evicted = self._reserve_slots(len(rows.key))
        admitted = slice(0, len(slots))
        self._write_rows(slots, rows.row[admitted], rows.state[admitted])
        self._index.put(rows.key[admitted], slots)
        self._key[slots], self._step[slots] = rows.key[admitted], rows.step[admitted]
        self._held[slots], self._dirty[slots], self._pins[slots] = True, False, 0
        self._uses[slots], self._last[slots], self._next[slots] = 1, self._clock, NEVER
        return evicted

    def pin(self, step: int, keys: np.ndarray) -> None:
        """Protect the cached rows among these distinct keys from eviction until `release(step)` is called."""
        slots = self._index.find(keys)
        present = slots >= 0
        self._pins[slots[present]] += 1
        self._next[slots[present]] = np.minimum(self._next[slots[present]], step)
        self._pinned.setdefault(step, []).append(keys[present])

    def announce_batch(self, step: int, keys: np.ndarray) -> None:
        """Announce that the batch of `step` will need these distinct keys; a step that is not above the last one is ignored."""
        if step > self._ahead.last:
            self._ahead.add_batch(step, keys)
            slots = self._index.find(keys)
            slots = slots[slots >= 0]
            self._next[slots] = np.minimum(self._next[slots], step)

    def release(self, step: int) -> None:
        """Mark the batches up to `step` as finished: remove their pins and update the next use of their rows."""
        for finished_step in [pinned_step for pinned_step in self._pinned if pinned_step <= step]:
            for keys in self._pinned.pop(finished_step):
                slots = self._index.find(keys)
                slots = slots[slots >= 0]
                self._pins[slots] = np.maximum(self._pins[slots] - 1, 0)
                self._next[slots] = np.where(self._next[slots] <= step, NEVER, self._next[slots])
        for keys, next_steps in self._ahead.pop_batches(step):
            slots = self._index.find(keys)
            self._next[slots[slots >= 0]] = next_steps[slots >= 0]

    def pop_dirty(self, keys: np.ndarray | None = None) -> RowColumns:
        """Copy the rows that have changed on the device to the host and mark them as unchanged; `keys` limits the rows."""
        if keys is None:
            slots = np.flatnonzero(self._dirty)
        else:
            slots = np.unique(self._index.find(keys))
            slots = slots[slots >= 0]
            slots = slots[self._dirty[slots]]
        return self._copy_rows(slots)

    def overwrite(self, rows: RowColumns) -> None:
        """Replace the values of rows that are cached and mark them as unchanged; rows that are not cached are ignored."""
        slots = self._index.find(rows.key)
        cached = rows.select(slots >= 0)
        slots = slots[slots >= 0]
        self._write_rows(slots, cached.row, cached.state)
        self._step[slots], self._dirty[slots] = cached.step, False

    def drop(self, keys: np.ndarray) -> None:
        """Remove the rows of these keys without copying their changes to the host."""
        slots = self._index.find(keys)
        slots = slots[slots >= 0]
        self._release_slots(np.unique(slots))

    def _reserve_slots(self, count: int) -> tuple[np.ndarray, RowColumns]:
        """Take up to `count` slots, evicting rows if necessary; return the slots and the changed rows that were evicted."""
        missing_slots = count - self._free_count
        victims = self._select_victims(missing_slots) if missing_slots > 0 else np.empty(0, np.int64)
        evicted = self._copy_rows(victims[self._dirty[victims]])
        self._release_slots(victims)
        count = min(count, self._free_count)
        self._free_count -= count
        return self._free[self._free_count : self._free_count + count].copy(), evicted

    def _select_victims(self, count: int) -> np.ndarray:
        """Select the slots of at most `count` evictable rows with a low priority, from a random sample if it is large enough."""
        if _CANDIDATES_PER_ROW * count < self.capacity:
            self._draws += 1
            generator = rng(self._seed, "device-cache", self._draws)
            sample = np.unique(generator.integers(0, self.capacity, _CANDIDATES_PER_ROW * count))
            slots = self._select_lowest(sample, count)
            if len(slots) == count:
                return slots
        return self._select_lowest(np.arange(self.capacity), count)

    def _select_lowest(self, slots: np.ndarray, count: int) -> np.ndarray:
        """Select from `slots` at most `count` evictable ones with the lowest priority."""
        priority = self._compute_priority(slots)
        count = min(count, int((priority != _PINNED).sum()))
        return slots[np.argpartition(priority, count - 1)[:count]] if count else slots[:0]

    def _compute_priority(self, slots: np.ndarray) -> np.ndarray:
        """Compute the priority of the rows in slots, int64 [N].

        Pinned rows have the highest priority, then rows that an announced batch needs (the sooner, the higher), then other
        rows (the more often or the more recently used, the higher).
        """
        next_step = self._next[slots]
        # LFU: by the use count, and among equal counts by the last use.
        past_use = self._uses[slots] << 32 | self._last[slots] if self.policy == "lfu" else self._last[slots]
        priority = np.where(next_step == NEVER, past_use, _ANNOUNCED - next_step)
        # The current batch uses the rows of the last training lookup; a slot without a row cannot be evicted.
        pinned = (self._pins[slots] > 0) | (self._last[slots] == self._clock) | ~self._held[slots]
        return np.where(pinned, _PINNED, priority)

    def _count_uses(self, uses: int) -> None:
        """Add to the number of uses, and halve all use counts when the sum exceeds a multiple of the capacity."""
        self._used += uses
        if self._used > _USES_PER_ROW * self.capacity:
            self._uses >>= 1
            self._used = 0

    def _copy_rows(self, slots: np.ndarray) -> RowColumns:
        """Copy the rows in these slots to the host and mark them as unchanged."""
        self._dirty[slots] = False
        device_slots = self._to_device(slots)
        row, state = (
            tensor.index_select(0, device_slots).float().cpu().numpy() for tensor in (self._rows, self._state)
        )
        return RowColumns(self._key[slots], row, state, self._step[slots], np.zeros(len(slots), bool))

    def _release_slots(self, slots: np.ndarray) -> None:
        """Remove the rows in these distinct slots, which become free."""
        self._index.drop(self._key[slots])
        self._held[slots], self._dirty[slots], self._pins[slots] = False, False, 0
        self._next[slots] = NEVER
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def _write_rows(self, slots: np.ndarray, row: np.ndarray, state: np.ndarray) -> None:
        """Copy rows and optimizer state from the host into these slots."""
        device_slots = self._to_device(slots)
        for target, values in ((self._rows, row), (self._state, state)):
            source = torch.from_numpy(np.require(values, requirements=["C", "W"]))
            target.index_copy_(0, device_slots, source.to(self.device).to(target.dtype))

    def _to_device(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)


NEVER = np.iinfo(np.int64).max  # The next step of a key that no announced batch needs.


class LookAhead:
    """The next use of each key in the announced batches; batches are announced and finished in the order of their steps.

    An occurrence is a key in a batch; occurrences are numbered over all announced batches.
    """

    def __init__(self) -> None:
        self._latest = SlotIndex("look-ahead")  # Key -> number of its latest occurrence.
        # For each occurrence from number `_first` on: the step of the next occurrence of the same key.
        self._next = np.empty(0, dtype=np.int64)
        self._first = 0
        self._batches: dict[int, np.ndarray] = {}  # Step -> keys.

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> int:
        """The last announced step, -1 before the first."""
        return next(reversed(self._batches), -1)

    def add_batch(self, step: int, keys: np.ndarray) -> None:
        """Announce that the batch of `step` needs these distinct keys [N]; steps must increase."""
        previous = self._latest.find(keys)
        self._next[previous[previous >= 0] - self._first] = step
        start = self._first + len(self._next)
        self._latest.put(keys, np.arange(start, start + len(keys)))
        self._next = np.concatenate([self._next, np.full(len(keys), NEVER)])
        self._batches[step] = keys

    def pop_batches(self, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Remove the batches up to `step`; return the keys of each batch and the step that uses each key next (or NEVER)."""
        batches = []
        for finished_step in [batch_step for batch_step in self._batches if batch_step <= step]:
            keys = self._batches.pop(finished_step)
            next_steps, self._next = self._next[: len(keys)].copy(), self._next[len(keys) :]
            self._first += len(keys)
            self._latest.drop(keys[next_steps == NEVER])
            batches.append((keys, next_steps))
        return batches
