"""The shipped rewards.

`hit` is 1 for a beam that is a target, else 0. `rank` is MiniOneRec's ranking reward (paper section 3.4, code `rl.py`). In a
group with a hit, the miss at position i scores -(1 / log2(i + 2)) / sum_j (1 / log2(j + 2)), so misses with a high probability
cost most. In a group without a hit, all scores are 0. MiniOneRec's default is the sum of `hit` and `rank`. `ndcg` scores a hit
by its contribution to the NDCG of its list, so the scores of a group add up to its NDCG. `rank`, `ndcg` and `diversity` depend
on the other beams of the list (listwise). The other rewards score each beam by itself (pointwise).
"""

from __future__ import annotations

import zlib
from typing import Annotated

import numpy as np
from pydantic import Field

from nonet.errors import ConfigError
from nonet.rl.rewards.api import Reward, reward
from nonet.rl.rewards.known import RunData
from nonet.types import Jagged, Rollouts

# Shapes: U users, W beams, L levels, I items, T recent events, K word buckets or categories, N distinct items, texts or rows.

_BUCKETS = 4096  # number of buckets into which words are hashed


@reward
def hit(item_id: np.ndarray, target: Jagged, valid: np.ndarray) -> np.ndarray:
    """Return 1 where the beam is one of the user's targets, else 0; [U, W] float32."""
    return _find_hits(item_id, target, valid).astype(np.float32)


@reward
def rank(item_id: np.ndarray, target: Jagged, valid: np.ndarray) -> np.ndarray:
    """Return 0 for each hit and a share of -1 for each miss, larger at earlier positions; [U, W] float32.

    All scores of a group without a hit are 0.
    """
    hits_UW = _find_hits(item_id, target, valid)
    gain_UW = np.where(valid, 1.0 / np.log2(np.arange(item_id.shape[1]) + 2.0), 0.0)
    share_UW = gain_UW / np.maximum(gain_UW.sum(1, keepdims=True), 1e-12)
    misses_UW = ~hits_UW & hits_UW.any(1, keepdims=True)
    return np.where(misses_UW, -share_UW, 0.0).astype(np.float32)


@reward
def ndcg(item_id: np.ndarray, target: Jagged, valid: np.ndarray) -> np.ndarray:
    """Return the contribution of each hit to the NDCG of its list, ordered by likelihood; [U, W] float32.

    The sum over a group is its NDCG.
    """
    hits_UW = _find_hits(item_id, target, valid)
    position_UW = np.cumsum(valid, 1) - 1  # position among the valid beams, from 0
    gain_UW = np.where(hits_UW, 1.0 / np.log2(np.maximum(position_UW, 0) + 2.0), 0.0)
    max_hits_U = np.minimum(np.diff(target.offsets), item_id.shape[1])
    ideal_by_hits = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(item_id.shape[1]) + 2.0))])
    return (gain_UW / np.maximum(ideal_by_hits[max_hits_U], 1e-12)[:, None]).astype(np.float32)


@reward
def novelty(events: np.ndarray, *, half_life: Annotated[float, Field(gt=0)] = 30.0) -> np.ndarray:
    """Return 0.5 ** (training events of the item / `half_life`), which is 1 for an item without events; [U, W] float32.

    Args:
        events: Column with the number of training events of each beam's item [U, W].
        half_life: Number of training events that halves the score.
    """
    if not half_life > 0:
        raise ConfigError(f"half_life is {half_life}; it is a number of events above 0")
    return (0.5 ** (events / half_life)).astype(np.float32)


class Prefix(Reward):
    """The reward `prefix`: the share of leading codes that a beam's semantic id has in common with the closest target's."""

    def open(self, run: RunData) -> None:
        """Store the run, whose item ids and semantic ids `score` reads."""
        self._run = run

    def score(self, r: Rollouts) -> np.ndarray:
        """Return the largest share of leading codes that a beam has in common with a target, [U, W]."""
        share_UW = np.zeros(r.item_id.shape, np.float32)
        target_items, counts_U = self._run.index(r.target.values), np.diff(r.target.offsets)
        for position in range(
            int(counts_U.max(initial=0))
        ):  # compares the target at this position of all users at once
            rows_N = np.flatnonzero(counts_U > position)
            item_N = target_items[np.asarray(r.target.offsets)[rows_N] + position]
            rows_N, item_N = rows_N[item_N >= 0], item_N[item_N >= 0]
            same_NWL = r.sid[rows_N] == self._run.sid[item_N][:, None]
            shared_NW = np.logical_and.accumulate(same_NWL, -1).mean(-1)
            share_UW[rows_N] = np.maximum(share_UW[rows_N], shared_NW)
        return share_UW


class Diversity(Reward):
    """The reward `diversity`: 1 - the mean Jaccard similarity of a beam's categories with those of the list's other beams.

    A beam that is alone in its list scores 1.

    Args:
        column: Text column of the items with the categories, separated by "|".
    """

    def __init__(self, column: str = "categories"):
        self.columns = [column]

    def score(self, r: Rollouts) -> np.ndarray:
        """Return 1 - the mean Jaccard similarity of each beam with the other beams of its prompt, [U, W]."""
        categories_UWK = _make_multi_hot(r[self.columns[0]], r.valid)
        intersection_UWW = categories_UWK @ categories_UWK.transpose(0, 2, 1)
        size_UW = categories_UWK.sum(-1)
        union_UWW = size_UW[:, :, None] + size_UW[:, None] - intersection_UWW
        jaccard_UWW = np.where(union_UWW > 0, intersection_UWW / np.maximum(union_UWW, 1), 0.0)
        is_other_UWW = r.valid[:, :, None] & r.valid[:, None] & ~np.eye(r.valid.shape[1], dtype=bool)
        other_count_UW = is_other_UWW.sum(-1)
        mean_UW = np.where(is_other_UWW, jaccard_UWW, 0).sum(-1) / np.maximum(other_count_UW, 1)
        return (1.0 - mean_UW).astype(np.float32)


class Cooccurrence(Reward):
    """The reward `cooccurrence`: how often a beam's item came soon after one of the user's last items in training.

    The score is the mean of count(past item, item) / count(past item) over the user's last items.

    Args:
        last: Number of the user's last events.
    """

    def __init__(self, last: Annotated[int, Field(ge=1)] = 5):
        self.last = last

    def open(self, run: RunData) -> None:
        """Store the run's counts of transitions between items, with sorted keys (past item * I + next item)."""
        transitions = self._transitions = run.transitions
        self._run, self._item_count = run, np.int64(len(transitions.occurs))
        past_items = np.repeat(np.arange(len(transitions.occurs), dtype=np.int64), np.diff(transitions.row))
        self._keys = past_items * self._item_count + transitions.item

    def score(self, r: Rollouts) -> np.ndarray:
        """Return the mean conditional frequency of each beam's item after the user's last events, [U, W]."""
        past_UT = _select_recent(self._run.index(r.history.values), r.history.offsets, self.last)
        key_UTW = past_UT[:, :, None] * self._item_count + r.item[:, None]
        known_UTW = (past_UT >= 0)[:, :, None] & (r.item >= 0)[:, None]
        index_UTW = np.minimum(np.searchsorted(self._keys, key_UTW), max(len(self._keys) - 1, 0))
        found_UTW = (
            known_UTW & (self._keys[index_UTW] == key_UTW) if len(self._keys) else np.zeros_like(known_UTW)
        )
        occurs_UT = np.maximum(self._transitions.occurs[np.maximum(past_UT, 0)], 1)
        count_UTW = np.where(
            found_UTW, np.asarray(self._transitions.count)[index_UTW] if len(self._keys) else 0, 0
        )
        share_UTW = count_UTW / occurs_UT[:, :, None]
        return (share_UTW.sum(1) / np.maximum((past_UT >= 0).sum(1), 1)[:, None]).astype(np.float32)


class TextSimilarity(Reward):
    """The reward `text_similarity`: the cosine similarity of a beam's text with the mean text of the user's last items.

    Texts are TF-IDF vectors with binary term frequencies. Words are hashed into 4096 buckets.

    Args:
        column: Text column of the items.
        last: Number of the user's last events.
    """

    def __init__(self, column: str = "title", last: Annotated[int, Field(ge=1)] = 5):
        self.column, self.last = column, last
        self.opened_columns = (column,)  # what `open` reads; it is looked for before a run starts

    def open(self, run: RunData) -> None:
        """Hash the words of the items' texts, and compute the inverse document frequencies of the hashed words."""
        texts = run.column(self.column).astype(np.str_)
        buckets_by_item = [
            np.unique([_hash_word(word) for word in text.lower().replace("|", " ").split()]) for text in texts
        ]
        self._run, self._buckets_by_item = run, [buckets.astype(np.int64) for buckets in buckets_by_item]
        # The empty array gives np.concatenate an input if the run has no items.
        all_buckets = np.concatenate([*self._buckets_by_item, np.zeros(0, np.int64)])
        text_count_K = np.bincount(all_buckets, minlength=_BUCKETS)
        self._idf_K = np.log((1 + len(texts)) / (1 + text_count_K)).astype(np.float32)

    def score(self, r: Rollouts) -> np.ndarray:
        """Return the cosine similarity of each beam's text with the mean text of the user's last items, [U, W]."""
        past_UT = _select_recent(self._run.index(r.history.values), r.history.offsets, self.last)
        item_N, row = np.unique(np.concatenate([past_UT.ravel(), r.item.ravel()]), return_inverse=True)
        vector_NK = np.zeros((len(item_N), _BUCKETS), np.float32)
        for n, item in enumerate(item_N):
            if item >= 0:
                vector_NK[n, self._buckets_by_item[item]] = self._idf_K[self._buckets_by_item[item]]
        vector_NK /= np.maximum(np.linalg.norm(vector_NK, axis=1, keepdims=True), 1e-12)
        past_row_UT = row[: past_UT.size].reshape(past_UT.shape)
        beam_row_UW = row[past_UT.size :].reshape(r.item.shape)
        score_UW = np.zeros(r.item.shape, np.float32)
        for user in range(len(past_row_UT)):
            sum_K = vector_NK[past_row_UT[user]].sum(0)  # the mean up to a factor, which the norm removes
            score_UW[user] = vector_NK[beam_row_UW[user]] @ (sum_K / max(float(np.linalg.norm(sum_K)), 1e-12))
        return score_UW


def _hash_word(word: str) -> int:
    """Return the bucket of a word, in [0, `_BUCKETS`)."""
    return zlib.crc32(word.encode()) % _BUCKETS


def _select_recent(items: np.ndarray, offsets: np.ndarray, last: int) -> np.ndarray:
    """Return the `last` newest items of each user [U, T] int64, newest first, padded with -1.

    The items of user u, oldest first, are items[offsets[u] : offsets[u + 1]].
    """
    offsets = np.asarray(offsets, np.int64)
    index_UT = offsets[1:, None] - 1 - np.arange(last)
    exists_UT = index_UT >= offsets[:-1, None]
    return np.where(exists_UT, items[np.maximum(index_UT, 0)] if len(items) else -1, -1)


def _make_multi_hot(texts_UW: np.ndarray, valid_UW: np.ndarray) -> np.ndarray:
    """Return the categories of each beam as a multi-hot array [U, W, K] float32, all 0 for invalid beams."""
    texts, text_index = np.unique(texts_UW.astype(np.str_), return_inverse=True)
    categories_by_text = [[name for name in text.split("|") if name] for text in texts.tolist()]
    all_categories = sorted({name for categories in categories_by_text for name in categories})
    category_index = {name: index for index, name in enumerate(all_categories)}
    multi_hot_NK = np.zeros((len(texts), max(1, len(all_categories))), np.float32)
    for row, categories in enumerate(categories_by_text):
        multi_hot_NK[row, [category_index[name] for name in categories]] = 1.0
    return multi_hot_NK[text_index.reshape(texts_UW.shape)] * valid_UW[..., None]


def _find_hits(item_id: np.ndarray, target: Jagged, valid: np.ndarray) -> np.ndarray:
    """Return a mask [U, W] of the valid beams that are a target of their user."""
    counts_U = np.diff(target.offsets)
    hits_UW = np.zeros(item_id.shape, bool)
    for position in range(
        int(counts_U.max(initial=0))
    ):  # compares the target at this position of all users at once
        rows = np.flatnonzero(counts_U > position)
        hits_UW[rows] |= item_id[rows] == target.values[target.offsets[rows] + position][:, None]
    return hits_UW & valid
