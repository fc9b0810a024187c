"""Signals of items: attributes and words whose similarity with a user's newest events counts in the votes of a memory.

    s_k(y) = sum over the newest events x of w(x) cos_k(x, y)

w(x) is the weight of an event among the voters, and cos_k the cosine of two items in signal k, the IDF-weighted words of a column
of the item table. q(y) ~ p(y)^b v(y)^c exp(sum_k g_k s_k(y)) then prefers, among the items with votes, those that are like what
the user looked at (`memory.py`). A sparse matrix [I, F] holds the words of all signals; an item without words has s = 0. A column
of vectors is a signal too, whose words are the numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.stride_tricks import sliding_window_view

from nonet.embedding import splitmix64
from nonet.errors import DataError
from nonet.ranges import expand_ranges

# Shapes: I items, K signals, F words of all signals, E (item, word) pairs, P prompts, Y (prompt, voter) pairs, Z (prompt, item)
# pairs to compare, C items to search.

FORMAT = 2
_FORMAT_OF_WORDS = 1  # without columns of vectors
_TIE, _TURNS = (
    1e-7,
    997.0,
)  # Share of a similarity by which ties are broken; how fast their order turns with the voters.
_PAIRS = 1 << 12  # Pairs whose vectors are in memory at once.
_MAX_PRODUCTS = 1 << 22  # Products of words and prompts that are in memory at once.
_ARRAYS = ("row", "word", "value")
SIGNAL_FILES = {f"signal_{name}": f"signal_{name}.npy" for name in _ARRAYS} | {
    "signal_words": "signal_words.parquet"
}
"""Names of the files of signals in a folder or a version, by the name of their content."""


@dataclass(frozen=True, slots=True, eq=False)
class _VectorBlock:
    """The numbers of the vectors of one signal, D consecutive words of those items that have a vector.

    Attributes:
        signal: The signal, as an index of the names.
        first: The word that is the first number.
        width: The number D.
        start: Index in the words of all items of the first number of each item [I]; -1 without a vector.
    """

    signal: int
    first: int
    width: int
    start: np.ndarray


@dataclass(frozen=True, eq=False)
class ItemSignals:
    """The words of each item, in the signals of a memory.

    The words of item i are word[row[i]:row[i + 1]]; the values of an item's words in one signal have norm 1.

    Attributes:
        names: Names of the signals [K].
        row: Index of the first word of each item [I + 1] int64.
        word: Words [E] int32, as indices of `words`.
        value: Weight of each word of an item [E] float32.
        words: The words [F]: columns `word`, `signal` (index in `names`) and `idf`; with columns of vectors also `mean`, the
            mean of a number of the vectors.
        n_first: Number of items by which the words are weighted, without those that were added later.
    """

    names: tuple[str, ...]
    row: np.ndarray
    word: np.ndarray
    value: np.ndarray
    words: pa.Table
    n_first: int

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.row) - 1

    @cached_property
    def signal_of_word(self) -> np.ndarray:
        """Signal of each word [F], as an index of `names`."""
        return self.words["signal"].to_numpy()

    @cached_property
    def blocks(self) -> list[_VectorBlock]:
        """The signals of vectors, the last first; their numbers are the last words of an item and have an IDF of 1.

        Empty if an item has some numbers of a vector only, because earlier versions did not store zeros.
        """
        end, blocks = self.row[1:].astype(np.int64), list[_VectorBlock]()
        idf = self.words["idf"].to_numpy()
        for k in reversed(range(len(self.names))):
            of_signal = np.flatnonzero(self.signal_of_word == k)
            if not len(of_signal) or (idf[of_signal] != 1).any():
                continue
            first, width = int(of_signal[0]), len(of_signal)
            has_vector = end > self.row[:-1]
            has_vector[has_vector] = self.word[end[has_vector] - 1] >= first
            start = end[has_vector] - width
            if (start < self.row[:-1][has_vector]).any() or (self.word[start] != first).any():
                return []
            end[has_vector] = start
            blocks.append(_VectorBlock(k, first, width, np.where(has_vector, end, -1)))
        return blocks

    @cached_property
    def end(self) -> np.ndarray:
        """Index after the last word of each item that is in no block [I]."""
        starts = [np.where(block.start >= 0, block.start, self.row[1:]) for block in self.blocks]
        return np.min([self.row[1:], *starts], axis=0)

    def save(self, folder: str | Path) -> None:
        """Write the files to a folder."""
        folder = Path(folder)
        for name in _ARRAYS:
            np.save(folder / SIGNAL_FILES[f"signal_{name}"], getattr(self, name))
        metadata = {
            "format": str(FORMAT if "mean" in self.words.column_names else _FORMAT_OF_WORDS),
            "items": str(self.n_first),
            **{f"signal {k}": name for k, name in enumerate(self.names)},
        }
        pq.write_table(self.words.replace_schema_metadata(metadata), folder / SIGNAL_FILES["signal_words"])

    @classmethod
    def map(cls, files: Mapping[str, Path]) -> ItemSignals:
        """Memory-map the arrays in these files.

        Args:
            files: Path of each file by its name in `SIGNAL_FILES`.

        Raises:
            DataError: A file cannot be read or is of a newer version, or the files do not match.
        """
        try:
            words = pq.read_table(files["signal_words"])
            arrays = {name: np.load(files[f"signal_{name}"], mmap_mode="r") for name in _ARRAYS}
            signal_of_word, idf = words["signal"].to_numpy(), words["idf"].to_numpy()
            is_text = pa.types.is_string(words["word"].type)
            metadata = {key.decode(): value.decode() for key, value in (words.schema.metadata or {}).items()}
            n_first = int(metadata.get("items", 0))
            has_means = metadata.get("format") != str(FORMAT) or _are_finite(words["mean"].to_numpy())
        except (OSError, EOFError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
            raise DataError(
                f"signals {files['signal_words'].parent}: not readable ({error}). Run the tokenise stage again."
            ) from None
        if (number := metadata.get("format", "?")) not in (str(_FORMAT_OF_WORDS), str(FORMAT)):
            raise DataError(
                f"signals {files['signal_words'].parent}: format {number}; this version reads {_FORMAT_OF_WORDS} and {FORMAT}. "
                "Upgrade Nonet."
            )
        names = tuple(metadata[key] for k in range(len(metadata)) if (key := f"signal {k}") in metadata)
        row, word, value = (arrays[name] for name in _ARRAYS)
        if not (
            row.ndim == word.ndim == value.ndim == 1
            and _are_indices(row, len(word) + 1)
            and len(row)
            and row[0] == 0
            and row[-1] == len(word) == len(value)
            and bool((np.diff(row.astype(np.int64)) >= 0).all())
            and _are_indices(word, len(words))
            and _are_indices(signal_of_word, len(names))
            and _are_weights(value, 1.001, -1.001 if number == str(FORMAT) else 0.0)
            and _are_weights(idf, 100.0)
            and is_text
            and has_means
            and n_first > 0
        ):
            raise DataError(
                f"signals {files['signal_words'].parent}: the files do not match. Run the tokenise stage again."
            )
        return cls(names, **arrays, words=words, n_first=n_first)

    def make_profiles(
        self, prompt: np.ndarray, item: np.ndarray, weight: np.ndarray, n_prompts: int
    ) -> Profiles:
        """Sum the words of the voters of each prompt.

        Args:
            prompt: Prompt of each (prompt, voter) pair [Y].
            item: Item of each pair [Y].
            weight: Weight of each pair [Y].
            n_prompts: Number of prompts P.
        """
        pair, offsets = expand_ranges(self.row[item], self.row[item + 1])
        source = np.repeat(np.arange(len(item)), np.diff(offsets))
        used_words, column = np.unique(self.word[pair], return_inverse=True)
        n_columns = len(used_words) + 1  # The last column, always 0, is that of words that no voter has.
        cells = prompt[source] * n_columns + column
        sums = np.bincount(cells, weights=weight[source] * self.value[pair], minlength=n_prompts * n_columns)
        column_of_word = np.full(len(self.words), len(used_words), np.int64)
        column_of_word[used_words] = np.arange(len(used_words))
        return Profiles(self, sums.astype(np.float32).reshape(n_prompts, n_columns), column_of_word)


@dataclass(frozen=True, slots=True, eq=False)
class Profiles:
    """The summed words of the voters of P prompts.

    Attributes:
        signals: The words of the items.
        sums: Weighted sum of each used word over a prompt's voters [P, used + 1]; the last column is 0.
        column_of_word: Column in `sums` of each word [F].
    """

    signals: ItemSignals
    sums: np.ndarray
    column_of_word: np.ndarray

    def compute_similarities(self, prompt: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Compute the similarities s [Z, K] float32 of items with the voters of their prompts.

        Args:
            prompt: Prompt of each pair [Z].
            item: Item of each pair [Z].
        """
        signals, n_signals = self.signals, len(self.signals.names)
        pair, offsets = expand_ranges(signals.row[item], signals.end[item])
        source = np.repeat(np.arange(len(item)), np.diff(offsets))
        word = signals.word[pair]
        product = self.sums[prompt[source], self.column_of_word[word]] * signals.value[pair]
        cells = source if n_signals == 1 else source * n_signals + signals.signal_of_word[word]
        sums = np.bincount(cells, weights=product, minlength=len(item) * n_signals)
        similarity = sums.astype(np.float32).reshape(len(item), n_signals)
        for block in signals.blocks:
            column = self.column_of_word[block.first]
            if column == self.sums.shape[1] - 1:
                continue  # No voter has a vector.
            value = sliding_window_view(signals.value, block.width)
            profile = self.sums[:, column : column + block.width]
            has_vector = np.flatnonzero(block.start[item] >= 0)
            for pairs in np.split(has_vector, range(_PAIRS, len(has_vector), _PAIRS)):
                similarity[pairs, block.signal] = np.einsum(
                    "zd,zd->z", profile[prompt[pairs]], value[block.start[item[pairs]]]
                )
        return similarity


@dataclass(frozen=True, slots=True, eq=False)
class ItemSearch:
    """Finds, of a set of items, those that are most similar to the voters of prompts; time grows with the words of the set.

    Attributes:
        signals: The words of all items.
        items: The items of the set [C], ascending.
        word: Their words, in the order of the items [E].
        place: Index in `items` of each word's item [E].
        value: Weight of each word of an item [E].
    """

    signals: ItemSignals
    items: np.ndarray
    word: np.ndarray
    place: np.ndarray
    value: np.ndarray

    @classmethod
    def of(cls, signals: ItemSignals, items: np.ndarray) -> ItemSearch:
        """Collect the words of a set of items [C]."""
        pair, offsets = expand_ranges(signals.row[items], signals.row[items + 1])
        place = np.repeat(np.arange(len(items)), np.diff(offsets))
        return cls(signals, items, signals.word[pair], place, signals.value[pair])

    def find_similar(
        self,
        profiles: Profiles,
        weights: np.ndarray,
        n_best: int,
        select: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the items with the highest sum of weighted similarities, above 0, for each prompt.

        Of equally similar items, other ones are preferred for other prompts.

        Args:
            profiles: The words of the voters.
            weights: Weight of each signal [K].
            n_best: Number of items per prompt.
            select: Returns which pairs of prompts [Z] and items [Z] may be found.

        Returns:
            Prompt [Z], item [Z] and weighted similarity [Z] of (prompt, item) pairs, by prompt.
        """
        column = profiles.column_of_word[self.word]
        used = np.flatnonzero(column < profiles.sums.shape[1] - 1)
        place, start = np.unique(self.place[used], return_index=True)
        column, value = column[used], self.value[used] * weights[self.signals.signal_of_word[self.word[used]]]
        parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
        # A number in [0, 1) for each item, by which equally similar items are ordered.
        tie = splitmix64(self.items[place].astype(np.uint64)) * 2.0**-64
        size = max(1, _MAX_PRODUCTS // max(1, len(used)))
        for p in range(0, len(profiles.sums) if len(place) else 0, size):
            products = profiles.sums[p : p + size, column].T * value[:, None]
            # In fp32, so that the words of other prompts, which add zeros, change nothing.
            scores = np.add.reduceat(products, start, axis=0).T.astype(np.float32)
            prompt, found = np.nonzero(scores > 0)
            is_left_out = ~select(prompt + p, self.items[place[found]])
            scores[prompt[is_left_out], found[is_left_out]] = 0
            if scores.shape[1] > n_best:
                turn = (profiles.sums[p : p + size].sum(1, dtype=np.float64) * _TURNS)[:, None]
                order = scores * (1 + _TIE * ((tie + turn) % 1))
                kept = np.argpartition(-order, n_best - 1, axis=1)[:, :n_best]
                best = np.zeros_like(scores)
                np.put_along_axis(best, kept, np.take_along_axis(scores, kept, 1), 1)
                scores = best
            prompt, found = np.nonzero(scores > 0)
            parts.append((prompt + p, self.items[place[found]], scores[prompt, found].astype(np.float64)))
        prompt, item, score = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return prompt, item, score


def open_signals(files: Mapping[str, Path], names: Sequence[str], n_items: int) -> ItemSignals | None:
    """Open the signals of a memory; None if it has none.

    Args:
        files: Files of the memory's counts and signals by name.
        names: Names of the signals that the memory was trained with.
        n_items: Number of items of the memory's counts.

    Raises:
        DataError: The files lack a signal, are those of other items, or cannot be read.
    """
    if not names:
        return None
    missing = [name for name in SIGNAL_FILES if name not in files]
    if missing:
        raise DataError(f"the memory has signals {', '.join(names)}, and there is no {missing[0]}.")
    signals = ItemSignals.map(files)
    if list(signals.names) != list(names):
        raise DataError(
            f"the memory has signals {', '.join(names)}, and its files have {', '.join(signals.names)}."
        )
    if len(signals) != n_items:
        raise DataError(
            f"the memory counts {n_items:,} items, and its signals are of {len(signals):,} items."
        )
    return signals


def _are_finite(values: np.ndarray) -> bool:
    """Return whether all values are finite numbers."""
    return values.dtype.kind == "f" and bool(np.isfinite(values).all())


def _are_indices(values: np.ndarray, size: int) -> bool:
    """Return whether all values are integers in [0, size)."""
    return values.dtype.kind in "iu" and (not len(values) or (values.min() >= 0 and values.max() < size))


def _are_weights(values: np.ndarray, largest: float, smallest: float = 0.0) -> bool:
    """Return whether all values are numbers in [smallest, largest]."""
    return values.dtype.kind == "f" and bool(((values >= smallest) & (values <= largest)).all())
