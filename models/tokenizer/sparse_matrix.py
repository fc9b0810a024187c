"""Sparse statistics of items, and their dense factors.

`compute_ppmi` is the positive pointwise mutual information between items that are close in TRAIN events (Levy & Goldberg 2014),
so held-out events never affect a semantic id. `compute_tfidf` weights the words of texts. `compute_svd` is randomised (Halko et
al. 2011) with a seed: no [I, I] table, 1 s for 3,500 items and 90,000 events.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nonet.random import rng
from nonet.samples.sequences import TRAIN, PairCounter, Sequences, find_top_neighbours

if TYPE_CHECKING:
    import torch

# Shapes: I items, F features (words, or items), n nonzeros, W columns of a basis.
_MAX_DISTANCE = 5  # Maximum distance of co-occurring events, with weight 1 / sqrt(distance).
_MAX_NEIGHBOURS = 24_000_000  # Maximum number of pairs of items, if they are counted by ranges of items.
_CSR_NONZEROS = 1 << 23  # Above this number of nonzeros, CSR is used: twice as fast, a third of the memory.
_CONTEXT_EXPONENT = 0.75  # Exponent of the context counts, so that PMI does not favour rare items.
_OVERSAMPLE, _POWER_ITERATIONS = 10, 4  # Oversampling and power iterations of the randomised SVD.


@dataclass(frozen=True, slots=True)
class SparseMatrix:
    """A sparse float32 matrix in coordinates, sorted by row, then column.

    Attributes:
        row: Rows [n].
        column: Columns [n].
        value: Values [n].
        shape: Numbers of rows and columns.
    """

    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    shape: tuple[int, int]

    def to_tensor(self) -> torch.Tensor:
        """Return a sparse tensor of torch: by coordinates, or by compressed rows if there are very many nonzeros."""
        import torch  # checks of a tokenizer load this module, and need no torch

        if len(self.value) > _CSR_NONZEROS:
            row_offsets = np.searchsorted(self.row, np.arange(self.shape[0] + 1)).astype(np.int64)
            rows, columns = torch.from_numpy(row_offsets), torch.from_numpy(self.column.astype(np.int64))
            value = torch.from_numpy(self.value.astype(np.float32))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that CSR tensors are in beta.
                return torch.sparse_csr_tensor(rows, columns, value, self.shape, check_invariants=False)
        index = torch.from_numpy(np.stack([self.row, self.column]).astype(np.int64))
        return torch.sparse_coo_tensor(
            index, torch.from_numpy(self.value.astype(np.float32)), self.shape, check_invariants=False
        ).coalesce()

    def transpose(self) -> SparseMatrix:
        """Return the transposed matrix."""
        order = np.lexsort((self.row, self.column))
        return SparseMatrix(
            self.column[order], self.row[order], self.value[order], (self.shape[1], self.shape[0])
        )


def compute_ppmi(seq: Sequences, n_items: int) -> SparseMatrix:
    """Compute the symmetric positive PMI [I, I] of items that are close in users' TRAIN events.

    If `PairCounter` counts several ranges of items, because there are too many events, only the most frequent neighbours of each
    item are kept, at most 24 M in total. Their PMI is exact.
    """
    pairs = PairCounter(n_items, _MAX_DISTANCE, np.arange(1, _MAX_DISTANCE + 1) ** -0.5, both=True)
    max_neighbours, count_I = max(1, _MAX_NEIGHBOURS // n_items), np.zeros(n_items)
    rows, columns, counts = [], [], []
    for sources, key, count in pairs.count_ranges(seq, lambda part: part.split == TRAIN):
        count_I += np.bincount(key // n_items, weights=count, minlength=n_items)
        if len(sources) < n_items:
            first_key = sources.start * n_items
            key = key - first_key
            kept = find_top_neighbours(key, count, n_items, max_neighbours, len(sources))
            key, count = key[kept], count[kept]
            key = key + first_key
        rows.append((key // n_items).astype(np.int32))
        columns.append((key % n_items).astype(np.int32))
        counts.append(count)
    row, column, count = (np.concatenate(parts) for parts in (rows, columns, counts))
    context_prob_I = count_I**_CONTEXT_EXPONENT / max((count_I**_CONTEXT_EXPONENT).sum(), 1e-12)
    value = np.log(count / (count_I[row] * context_prob_I[column]))
    is_positive = value > 0
    return SparseMatrix(row[is_positive], column[is_positive], value[is_positive], (n_items, n_items))


def compute_tfidf(texts: Iterable[Sequence[str]]) -> SparseMatrix:
    """Compute TF-IDF [I, F] with rows of norm 1, of the words in at least two texts, or of all words if none is."""
    index_by_word: dict[str, int] = {}
    word_indices, text_lengths = array("q"), array("q")
    for text in texts:
        word_indices.extend(index_by_word.setdefault(word, len(index_by_word)) for word in text)
        text_lengths.append(len(text))
    words, words_per_text = sorted(index_by_word), np.frombuffer(text_lengths, np.int64)
    column_of_index = np.empty(len(words), np.int64)
    column_of_index[[index_by_word[word] for word in words]] = np.arange(len(words))
    row = np.repeat(np.arange(len(words_per_text)), words_per_text)
    column = column_of_index[np.frombuffer(word_indices, np.int64)]
    distinct_keys, count = np.unique(row * max(len(words), 1) + column, return_counts=True)
    row, column = distinct_keys // max(len(words), 1), distinct_keys % max(len(words), 1)
    n_texts_with_word = np.bincount(column, minlength=len(words))
    if (n_texts_with_word > 1).any():
        is_frequent = n_texts_with_word[column] > 1
        row, column, count = row[is_frequent], column[is_frequent], count[is_frequent]
    value = count * (np.log((1 + len(words_per_text)) / (1 + n_texts_with_word[column])) + 1)
    norm = np.sqrt(np.bincount(row, weights=value**2, minlength=len(words_per_text)))
    return SparseMatrix(row, column, value / norm[row], (len(words_per_text), max(len(words), 1)))


def compute_svd(matrix: SparseMatrix, dim: int, seed: int, name: str, *, power: float = 1.0) -> np.ndarray:
    """Compute the left singular vectors times singular values ** power, [I, min(dim, I, F)] float32.

    One thread computes them: several round differently, so that items would get other codes on another machine.

    Args:
        matrix: The matrix [I, F].
        dim: Maximum number of singular vectors.
        seed: Seed of the run.
        name: Name of the source; with the seed, it determines the start vectors.
        power: Exponent of the singular values.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _compute_svd(matrix, dim, seed, name, power)
    finally:
        torch.set_num_threads(threads)


def _compute_svd(matrix: SparseMatrix, dim: int, seed: int, name: str, power: float) -> np.ndarray:
    """Compute the result of `compute_svd` with the current number of threads."""
    import torch

    matrix_IF, matrix_FI = matrix.to_tensor(), matrix.transpose().to_tensor()
    width = min(dim + _OVERSAMPLE, *matrix.shape)
    start_FW = rng(seed, "tokenise", "svd", name).standard_normal((matrix.shape[1], width), dtype=np.float32)
    basis_IW, _ = torch.linalg.qr(torch.sparse.mm(matrix_IF, torch.from_numpy(start_FW)))
    for _ in range(_POWER_ITERATIONS):
        basis_FW, _ = torch.linalg.qr(torch.sparse.mm(matrix_FI, basis_IW))
        basis_IW, _ = torch.linalg.qr(torch.sparse.mm(matrix_IF, basis_FW))
    rotation, values, _ = torch.linalg.svd(torch.sparse.mm(matrix_FI, basis_IW).T, full_matrices=False)
    vectors = basis_IW @ rotation
    return (vectors * values**power)[:, :dim].numpy()
