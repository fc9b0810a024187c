"""Filters: conditions over item columns, as masks over the trie of a catalogue that many questions share.

The filters of a batch are stored in one array with one word per leaf of the trie and 64 filters, and one bit per filter. It is
built in one pass, and a look-up reads one word. A list of excluded items would have to be sorted for every question.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.models.generation import SubCatalogue, Trie

# Shapes: Q questions, G words of 64 filters, I items, F pairs of a question and a leaf, D pairs of a question and a node.
CACHE_BYTES = 128 << 20  # Default limit of a `FilterCache`.
_WORD_DTYPES = tuple(np.dtype(kind) for kind in (np.int8, np.int16, np.int32, np.int64))
_FEW_LEAVES = 64  # Leaves per node that `mask_complete` checks at least before it checks all of them.


@dataclass(frozen=True, slots=True, eq=False)
class ItemFilter:
    """A condition and the items that it allows.

    Attributes:
        text: The condition.
        catalogue: Version of the catalogue that the items belong to.
        allowed: Mask [I] of the allowed items of the dense index.
    """

    text: str
    catalogue: str
    allowed: np.ndarray

    @property
    def key(self) -> tuple[str, str]:
        """Key of the filter in a cache; equal keys have equal masks."""
        return self.catalogue, self.text

    def make_mask(self, items: int) -> np.ndarray:
        """Return the mask for a catalogue of `items` items; items that were added later are not allowed."""
        mask = np.zeros(items, bool)
        n_known = min(items, len(self.allowed))
        mask[:n_known] = self.allowed[:n_known]
        return mask

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the mask as bits."""
        return _unpack_filter, (self.text, self.catalogue, np.packbits(self.allowed), len(self.allowed))


def _unpack_filter(text: str, catalogue: str, bits: np.ndarray, items: int) -> ItemFilter:
    """Return the filter that `ItemFilter.__reduce__` packed: one bit for each of `items` items."""
    return ItemFilter(text, catalogue, np.unpackbits(bits, count=items).astype(bool))


class FilterCache:
    """Cache of the bit masks of batches of filters over one trie, limited in bytes; the least recently used are evicted."""

    def __init__(self, trie: Trie, most_bytes: int = CACHE_BYTES):
        self._trie, self._most_bytes = trie, most_bytes
        self._masks: OrderedDict[tuple[tuple[str, str], ...], FilterBits] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size of all masks in bytes."""
        return sum(mask.nbytes for mask in self._masks.values())

    def make_batch(self, filters: Sequence[ItemFilter | None]) -> FilteredBatch | None:
        """Return the masks of a batch of questions; None if none of them has a filter."""
        filter_by_key = {item_filter.key: item_filter for item_filter in filters if item_filter is not None}
        if not filter_by_key:
            return None
        keys = sorted(filter_by_key)
        index_by_key = {key: index for index, key in enumerate(keys)}
        bits = self._get_bits(tuple(keys), [filter_by_key[key] for key in keys])
        which = np.array([-1 if entry is None else index_by_key[entry.key] for entry in filters])
        return FilteredBatch(bits, which)

    def _get_bits(self, keys: tuple[tuple[str, str], ...], filters: Sequence[ItemFilter]) -> FilterBits:
        """Return the bit masks of filters from the cache; compute them if they are missing, and evict others beyond the limit."""
        with self._lock:
            bits = self._masks.pop(keys, None) or FilterBits(self._trie, filters)
            self._masks[keys] = bits
            while len(self._masks) > 1 and self.nbytes > self._most_bytes:
                self._masks.popitem(last=False)
            return bits


class FilterBits:
    """Bit masks of filters, up to 64 per word: for every node of a trie, whether a filter allows a leaf below it."""

    def __init__(self, trie: Trie, filters: Sequence[ItemFilter]):
        self.trie, self.filters = trie, list(filters)
        dtype = next(word for word in _WORD_DTYPES if 8 * word.itemsize >= min(len(filters), 64))
        words_by_group = [self._pack_leaf_words(dtype, first) for first in range(0, len(filters), 64)]
        self._levels = {trie.levels: np.stack(words_by_group)}  # by level, words [G, N] for its N nodes
        self._tensors: dict[tuple[int, str], Tensor] = {}

    def _pack_leaf_words(self, dtype: np.dtype[Any], first: int) -> np.ndarray:
        """Return the word of each leaf for the (up to) 64 filters from `first` on."""
        word_I = np.zeros(self.trie.n_items, dtype)
        for bit, item_filter in enumerate(self.filters[first : first + 64]):
            word_I |= item_filter.make_mask(len(word_I)).astype(dtype) << dtype.type(bit)
        return np.take(word_I, self.trie.item_of_leaf, mode="clip")

    @property
    def nbytes(self) -> int:
        """Size of the words in bytes."""
        return sum(words.nbytes for words in self._levels.values())

    def allow(self, level: int, filter_X: Tensor, node_X: Tensor) -> Tensor:
        """Return whether the filter allows a leaf below the node of each (filter, node) pair [X]; filter -1 allows all."""
        key = level, str(node_X.device)
        if key not in self._tensors:
            self._tensors[key] = torch.from_numpy(self._get_words(level)).to(node_X.device)
        chosen_X = filter_X.clamp_min(0)
        word_X = self._tensors[key][chosen_X // 64, node_X]
        bit_X = (chosen_X % 64).to(word_X.dtype)
        return (torch.bitwise_right_shift(word_X, bit_X) & 1).bool() | (filter_X < 0)

    def _get_words(self, level: int) -> np.ndarray:
        """Return the words [G, N] of the nodes of a level, computed from those of their children and cached."""
        if level not in self._levels:
            first_child = self.trie.first_child[level][:-1]
            self._levels[level] = np.bitwise_or.reduceat(self._get_words(level + 1), first_child, axis=1)
        return self._levels[level]


class FilteredBatch(SubCatalogue):
    """A batch of questions, each with a filter or none: `which_Q` is the filter of each question, -1 for none."""

    def __init__(self, bits: FilterBits, which_Q: np.ndarray):
        self._bits, self._filter_of_Q = bits, torch.from_numpy(np.asarray(which_Q, np.int64))

    def select_prompts(self, which_U: np.ndarray) -> SubCatalogue:
        """Return the filters of the questions with the indices `which_U`, in that order."""
        return FilteredBatch(self._bits, self._filter_of_Q.numpy()[which_U])

    def list_excluded_items(self, prompts: int) -> list[np.ndarray]:
        """Return for each question the dense indices of the items that are excluded."""
        n_items = self._bits.trie.n_items
        excluded = [np.flatnonzero(~entry.make_mask(n_items)) for entry in self._bits.filters]
        none = np.empty(0, np.int64)
        return [none if which < 0 else excluded[which] for which in self._filter_of_Q.tolist()]

    def mask_excluded(self, leaf_UX: Tensor) -> Tensor:
        """Return a mask [Q, X] of the leaves that are excluded for their question."""
        return self.mask_dead_nodes(self._bits.trie.levels, leaf_UX)

    def mask_dead_nodes(self, level: int, node_UVK: Tensor) -> Tensor:
        """Return a mask [Q, V, K] of the nodes of a level below which the question's filter allows no item."""
        filter_U = self._filter_of_Q.to(node_UVK.device).view(-1, *[1] * (node_UVK.ndim - 1))
        return ~self._bits.allow(level, filter_U.expand_as(node_UVK), node_UVK)

    def mask_excluded_pairs(self, user_F: Tensor, leaf_F: Tensor, prompts: int) -> Tensor:
        """Return a mask [F] of the (question, leaf) pairs that are excluded."""
        return ~self._bits.allow(self._bits.trie.levels, self._filter_of_Q.to(user_F.device)[user_F], leaf_F)

    def mask_complete(
        self, level: int, user_D: Tensor, node_D: Tensor, count_D: Tensor, prompts: int
    ) -> Tensor:
        """Return a mask [D] of the (question, node) pairs below which the filter allows exactly `count_D` leaves.

        At least `count_D` are allowed. A few leaves of each node are checked first, and all of them only if these do not decide.
        """
        filter_D = self._filter_of_Q.to(user_D.device)[user_D]
        n_leaves_D = self._bits.trie.count_leaves(level, node_D)
        n_checked_D = torch.minimum(n_leaves_D, 4 * count_D + _FEW_LEAVES)
        is_complete_D = self._count_allowed(level, filter_D, node_D, n_checked_D) <= count_D
        unsure_d = (is_complete_D & (n_checked_D < n_leaves_D)).nonzero().squeeze(1)
        counts = self._count_allowed(level, filter_D[unsure_d], node_D[unsure_d], n_leaves_D[unsure_d])
        is_complete_D[unsure_d] = counts <= count_D[unsure_d]
        return is_complete_D

    def _count_allowed(self, level: int, filter_D: Tensor, node_D: Tensor, n_checked_D: Tensor) -> Tensor:
        """Count the allowed leaves among the first `n_checked_D` leaves below each node."""
        trie = self._bits.trie
        first_D = (
            node_D if level == trie.levels else trie.get_tensor("first_leaf", level, node_D.device)[node_D]
        )
        pair_F = torch.repeat_interleave(n_checked_D)
        begin_D = n_checked_D.cumsum(0) - n_checked_D
        offset_F = torch.arange(len(pair_F), device=pair_F.device) - begin_D[pair_F]
        allowed_F = self._bits.allow(trie.levels, filter_D[pair_F], first_D[pair_F].long() + offset_F)
        return torch.zeros_like(n_checked_D).index_add_(0, pair_F, allowed_F.long())
