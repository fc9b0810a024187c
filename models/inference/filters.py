"""Filters: conditions over item columns, as masks over the trie of a catalogue that many questions share.

A filter that leaves out half of a catalogue is one mask, made once for a condition; a list of the items that are left out would
be sorted for every question.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.models.generation import SubCatalogue, Trie

# Shapes: Q questions, C distinct filters, I items, F pairs of a question and a leaf.
CACHE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, eq=False)
class ItemFilter:
    """A condition and what it allows.

    Attributes:
        text: The condition.
        catalogue: Version of the catalogue whose items these are.
        allowed: Which items [I] of the dense index it allows, bool.
    """

    text: str
    catalogue: str
    allowed: np.ndarray

    @property
    def key(self) -> tuple[str, str]:
        """What it is cached by."""
        return self.catalogue, self.text

    def allowed_of(self, items: int) -> np.ndarray:
        """Return the mask for a catalogue of so many items: those that came later are not allowed."""
        mask = np.zeros(items, bool)
        count = min(items, len(self.allowed))
        mask[:count] = self.allowed[:count]
        return mask

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as bits."""
        return _unpack_filter, (self.text, self.catalogue, np.packbits(self.allowed), len(self.allowed))


def _unpack_filter(text: str, catalogue: str, bits: np.ndarray, items: int) -> ItemFilter:
    """Return the filter that `ItemFilter.__reduce__` packed: one bit for each of `items` items."""
    return ItemFilter(text, catalogue, np.unpackbits(bits, count=items).astype(bool))


class FilterCache:
    """Masks over one trie by filter, the newest ones, bounded in bytes."""

    def __init__(self, trie: Trie, most_bytes: int = CACHE_BYTES):
        self._trie, self._most_bytes = trie, most_bytes
        self._masks: OrderedDict[tuple[str, str], SubCatalogue] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all masks."""
        return sum(mask.nbytes for mask in self._masks.values())

    def within(self, filters: Sequence[ItemFilter | None]) -> FilteredBatch | None:
        """Return the masks of a batch of questions; None where none of them has a filter."""
        if not any(each is not None for each in filters):
            return None
        places: dict[tuple[str, str], int] = {}
        masks: list[SubCatalogue] = []
        which = np.full(len(filters), -1)
        for question, each in enumerate(filters):
            if each is None:
                continue
            if each.key not in places:
                places[each.key] = len(masks)
                masks.append(self._mask(each))
            which[question] = places[each.key]
        self._shrink()
        return FilteredBatch(masks, which)

    def _mask(self, each: ItemFilter) -> SubCatalogue:
        with self._lock:
            mask = self._masks.pop(each.key, None)
            if mask is None:
                mask = SubCatalogue(self._trie, each.allowed_of(self._trie.n_items)[None])
            self._masks[each.key] = mask
            return mask

    def _shrink(self) -> None:
        with self._lock:
            while len(self._masks) > 1 and self.nbytes > self._most_bytes:
                self._masks.popitem(last=False)


class FilteredBatch(SubCatalogue):
    """Questions with a filter each, or none: `which_Q` is the mask of each question, -1 for none."""

    def __init__(self, masks: Sequence[SubCatalogue], which_Q: np.ndarray):
        self._masks, self._mask_of_Q = list(masks), torch.from_numpy(np.asarray(which_Q, np.int64))

    def of(self, which_U: np.ndarray) -> SubCatalogue:
        """The filters of some of the questions."""
        return FilteredBatch(self._masks, self._mask_of_Q.numpy()[which_U])

    def out_items(self, prompts: int) -> list[np.ndarray]:
        """The items, of the dense index, that each question may not be given."""
        none, out = np.empty(0, np.int64), [mask.out_items(1)[0] for mask in self._masks]
        return [none if which < 0 else out[which] for which in self._mask_of_Q.tolist()]

    def out(self, leaf_UX: Tensor) -> Tensor:
        """Which leaves of each question are out [Q, X] bool."""
        return self._by_question(leaf_UX, lambda mask, leaf: mask.out(leaf))

    def dead(self, level: int, node_UVK: Tensor) -> Tensor:
        """Which nodes of a level lead to nothing that their question may be given, bool."""
        return self._by_question(node_UVK, lambda mask, node: mask.dead(level, node))

    def out_of(self, user_F: Tensor, leaf_F: Tensor, prompts: int) -> Tensor:
        """Which (question, leaf) pairs [F] are out."""
        out_F = torch.zeros(len(leaf_F), dtype=torch.bool, device=leaf_F.device)
        for at_F, mask in self._by_pair(user_F):
            out_F[at_F] = mask.out(leaf_F[at_F][None])[0]
        return out_F

    def closed_below(self, level: int, user_D: Tensor, node_D: Tensor, prompts: int) -> Tensor:
        """How many leaves below nodes [D] of a level are out for their questions."""
        count_D = torch.zeros_like(node_D)
        for at_D, mask in self._by_pair(user_D):
            first = torch.zeros_like(user_D[at_D])
            count_D[at_D] = mask.closed_below(level, first, node_D[at_D], 1)
        return count_D

    def _by_question(self, values: Tensor, look: Callable[[SubCatalogue, Tensor], Tensor]) -> Tensor:
        found = torch.zeros_like(values, dtype=torch.bool)
        which_Q = self._mask_of_Q.to(values.device)
        for place, mask in enumerate(self._masks):
            mine_q = (which_Q == place).nonzero().squeeze(1)
            found[mine_q] = look(mask, values[mine_q])
        return found

    def _by_pair(self, user_F: Tensor) -> list[tuple[Tensor, SubCatalogue]]:
        """Return for each mask the places [n] of the prompts [F] that it is for."""
        which_F = self._mask_of_Q.to(user_F.device)[user_F]
        return [((which_F == place).nonzero().squeeze(1), mask) for place, mask in enumerate(self._masks)]
