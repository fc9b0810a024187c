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

import numpy as np
import torch

from nonet.random import rng
from nonet.samples.sequences import TRAIN, PairCounter, Sequences, select_top_neighbours

# Shapes: I items, F features (words, or items), n nonzeros.
_NEAR = 5  # Maximum distance of co-occurring events, with weight 1 / sqrt(distance).
_MOST_NEIGHBOURS = 24_000_000  # Limit over all items, if co-occurrence is counted by ranges of items.
_COMPRESSED = 1 << 23  # Above this number of nonzeros, CSR is used: twice as fast, a third of the memory.
_SMOOTH = 0.75  # Exponent of the context counts, so that PMI does not favour rare items.
_OVERSAMPLE, _POWER = 10, 4  # Oversampling and power iterations of the randomised SVD.


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
        if len(self.value) > _COMPRESSED:
            first = np.searchsorted(self.row, np.arange(self.shape[0] + 1)).astype(np.int64)
            rows, columns = torch.from_numpy(first), torch.from_numpy(self.column.astype(np.int64))
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

    If there are more pairs of events than fit one range, they are counted by ranges of items, and only the most frequent
    neighbours of each item are kept. Their PMI is exact, and there are at most 24 M of them.
    """
    pairs = PairCounter(n_items, _NEAR, np.arange(1, _NEAR + 1) ** -0.5, both=True)
    most, total = max(1, _MOST_NEIGHBOURS // n_items), np.zeros(n_items)
    rows, columns, counts = [], [], []
    for sources, code, count in pairs.count_ranges(seq, lambda part: part.split == TRAIN):
        total += np.bincount(code // n_items, weights=count, minlength=n_items)
        if len(sources) < n_items:
            first = sources.start * n_items
            code, count = select_top_neighbours(code - first, count, n_items, most, len(sources))
            code = code + first
        rows.append((code // n_items).astype(np.int32))
        columns.append((code % n_items).astype(np.int32))
        counts.append(count)
    row, column, count = (np.concatenate(each) for each in (rows, columns, counts))
    context = total**_SMOOTH / max((total**_SMOOTH).sum(), 1e-12)
    value = np.log(count / (total[row] * context[column]))
    keep = value > 0
    return SparseMatrix(row[keep], column[keep], value[keep], (n_items, n_items))


def compute_tfidf(texts: Iterable[Sequence[str]]) -> SparseMatrix:
    """Compute TF-IDF [I, F] with rows of length 1, of words in at least two documents (of all words if there are none)."""
    number: dict[str, int] = {}
    met, lengths = array("q"), array("q")
    for document in texts:
        met.extend(number.setdefault(word, len(number)) for word in document)
        lengths.append(len(document))
    words, documents = sorted(number), np.frombuffer(lengths, np.int64)
    place = np.empty(len(words), np.int64)
    place[[number[word] for word in words]] = np.arange(len(words))
    row = np.repeat(np.arange(len(documents)), documents)
    column = place[np.frombuffer(met, np.int64)]
    cell, count = np.unique(row * max(len(words), 1) + column, return_counts=True)
    row, column = cell // max(len(words), 1), cell % max(len(words), 1)
    documents_of = np.bincount(column, minlength=len(words))
    if (documents_of > 1).any():
        keep = documents_of[column] > 1
        row, column, count = row[keep], column[keep], count[keep]
    value = count * (np.log((1 + len(documents)) / (1 + documents_of[column])) + 1)
    norm = np.sqrt(np.bincount(row, weights=value**2, minlength=len(documents)))
    return SparseMatrix(row, column, value / norm[row], (len(documents), max(len(words), 1)))


def compute_svd(matrix: SparseMatrix, dim: int, seed: int, name: str, *, power: float = 1.0) -> np.ndarray:
    """Compute left singular vectors times singular values ** power, [I, min(dim, rank bound)] float32.

    Args:
        matrix: The matrix [I, F].
        dim: Maximum number of singular vectors.
        seed: Seed of the run.
        name: Name of the source, which also seeds the start vectors.
        power: Exponent of the singular values.
    """
    a, at = matrix.to_tensor(), matrix.transpose().to_tensor()
    width = min(dim + _OVERSAMPLE, *matrix.shape)
    start = rng(seed, "tokenise", "svd", name).standard_normal((matrix.shape[1], width), dtype=np.float32)
    basis, _ = torch.linalg.qr(torch.sparse.mm(a, torch.from_numpy(start)))
    for _ in range(_POWER):
        other, _ = torch.linalg.qr(torch.sparse.mm(at, basis))
        basis, _ = torch.linalg.qr(torch.sparse.mm(a, other))
    small, values, _ = torch.linalg.svd(torch.sparse.mm(at, basis).T, full_matrices=False)
    vectors = basis @ small
    return (vectors * values**power)[:, :dim].numpy()
