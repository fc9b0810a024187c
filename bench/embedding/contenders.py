"""The contenders of `nonet bench embedding`, each with a table of its own.

The contenders named "core" are Nonet's tables. They look up unbounded ids in a hash table, whereas torch and FBGEMM get dense
row numbers, which are faster to look up. FBGEMM's TBE is used in its fastest form on a CPU: SUM bags of one id
(PoolingMode.NONE is 6 to 8 times slower), fused row-wise Adagrad, no bounds checks, and no autograd in a forward pass. The
contender "as it comes" has bounds checks and autograd, which are TBE's defaults.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.bench.embedding.keys import draw_zipf_ranks
from nonet.embedding import splitmix64
from nonet.embedding.tables import TableSpec, make_table
from nonet.random import rng

_FILL_CHUNK = 1 << 16  # rows that one call creates when a table is filled
_GRADS = 4  # number of different gradients


@cache
def explain_missing_fbgemm() -> str:
    """Return the reason why FBGEMM cannot be imported, or "" if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    except Exception as error:  # a wheel that was built for another torch raises various errors
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def hash_ranks(ranks: np.ndarray) -> Tensor:
    """Return the 64-bit ids of these ranks: hashes, which are spread over the whole range."""
    return torch.from_numpy(splitmix64(ranks + 12345).view(np.int64))


def draw_ranks(kind: str, rows: int, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Draw ranks below `rows`, from Zipf(1.05) or, for the kind "uniform", from the uniform distribution."""
    source = rng(seed, "bench", kind, rows)
    if kind == "uniform":
        return source.integers(0, rows, shape)
    return draw_zipf_ranks(source, rows, shape)


class Contenders:
    """The batches of a benchmark, and the contenders by name.

    Args:
        rows: Number of rows of each table.
        width: Width of a row.
        keys: Number of ids of a batch.
        batches: Number of batches.
        seed: Seed of the ids and gradients.
        kind: Distribution of the ids, "zipf" or "uniform".
    """

    def __init__(self, rows: int, width: int, keys: int, batches: int, seed: int, kind: str):
        self.rows, self.width, self.seed = rows, width, seed
        self._shape = (batches, keys)
        self._calls: dict[str, Callable[[int], Any]] = {}
        self.draw(kind)
        generator = torch.Generator().manual_seed(seed)
        # There are few of them, so that they stay in the CPU's cache, as they would after a backward pass.
        grads = [torch.randn(keys, width, generator=generator) * 0.01 for _ in range(_GRADS)]
        self.grads = [grads[batch % _GRADS] for batch in range(batches)]
        self.offsets = torch.arange(keys + 1)
        self._makers = {
            "torch index_select": self._make_index_select,
            "torch index_select again": self._make_index_select,  # shows by how much two equal contenders differ
            "core lookup": self._make_lookup,
            "TBE forward (CPU)": lambda: self._make_tbe("EXACT_SGD", train=False),
            "TBE forward as it comes (CPU)": lambda: self._make_tbe(
                "EXACT_SGD", train=False, checks="WARNING"
            ),
            "core train step": lambda: self._make_train_step("rowwise_adagrad"),
            "TBE train step (CPU, no hashing)": lambda: self._make_tbe("EXACT_ROWWISE_ADAGRAD"),
            "TBE SGD step (CPU, no hashing)": lambda: self._make_tbe("EXACT_SGD"),
            "torch Embedding(sparse) SGD step": self._make_sparse_sgd,
            "core Adam step": lambda: self._make_train_step("adam"),
            "torch SparseAdam step": self._make_sparse_adam,
        }

    def draw(self, kind: str) -> None:
        """Replace the batches by new ones from a distribution."""
        ranks = draw_ranks(kind, self.rows, self._shape, self.seed)
        self.ranks = [torch.from_numpy(batch.astype(np.int64)) for batch in ranks]
        self.ids = [hash_ranks(batch) for batch in ranks]

    def make_calls(self, *names: str) -> dict[str, Callable[[int], Any]]:
        """Return contenders as functions of a batch number. Their tables are made on first use.

        Args:
            names: Names of contenders; by default all except those with Adam and the TBE "as it comes". TBE is left out if
                FBGEMM cannot be imported.
        """
        for name in names or [name for name in self._makers if "Adam" not in name and "comes" not in name]:
            if name not in self._calls and not (name.startswith("TBE") and explain_missing_fbgemm()):
                self._calls[name] = self._makers[name]()
        return {name: self._calls[name] for name in names or self._calls if name in self._calls}

    def _make_index_select(self) -> Callable[[int], Any]:
        dense = torch.randn(self.rows, self.width)
        return lambda batch: dense.index_select(0, self.ranks[batch])

    def _make_lookup(self) -> Callable[[int], Any]:
        table = self._make_filled_table("rowwise_adagrad")
        return lambda batch: table.lookup(self.ids[batch], train=False)

    def _make_train_step(self, optimizer: str) -> Callable[[int], Any]:
        """Return a train step of Nonet's table."""
        table = self._make_filled_table(optimizer)

        def step(batch: int) -> None:
            table.lookup(self.ids[batch], train=True)
            table.apply(self.ids[batch], self.grads[batch], table.step + 1)

        return step

    def _make_filled_table(self, optimizer: str) -> Any:
        table = make_table("bench", TableSpec(self.width, optimizer, lr=0.01), self.seed)
        for start in range(0, self.rows, _FILL_CHUNK):
            table.lookup(hash_ranks(np.arange(start, min(start + _FILL_CHUNK, self.rows))), train=True)
        return table

    def _make_tbe(self, optimizer: str, train: bool = True, checks: str = "NONE") -> Callable[[int], Any]:
        """Return a forward pass or train step of FBGEMM's TBE; `checks` is its bounds check mode."""
        ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        table_spec = (self.rows, self.width, common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
        bags = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [table_spec],
            bounds_check_mode=common.BoundsCheckMode[checks],
            optimizer=ops.OptimType[optimizer],
            learning_rate=0.01,
            eps=1e-8,
        )
        bags.init_embedding_weights_uniform(-0.02, 0.02)  # also touches every page before anything is timed
        if train:
            return lambda batch: bags(self.ranks[batch], self.offsets).backward(self.grads[batch])

        def forward(batch: int) -> Tensor:
            with torch.set_grad_enabled(checks != "NONE"):
                return bags(self.ranks[batch], self.offsets)

        return forward

    def _make_sparse_sgd(self) -> Callable[[int], Any]:
        layer = torch.nn.Embedding(self.rows, self.width, sparse=True)
        return self._make_torch_step(layer, torch.optim.SGD(layer.parameters(), lr=0.01))

    def _make_sparse_adam(self) -> Callable[[int], Any]:
        layer = torch.nn.Embedding(self.rows, self.width, sparse=True)
        return self._make_torch_step(layer, torch.optim.SparseAdam(list(layer.parameters()), lr=0.01))

    def _make_torch_step(
        self, layer: torch.nn.Embedding, optimizer: torch.optim.Optimizer
    ) -> Callable[[int], Any]:
        """Return a train step of a torch embedding layer."""

        def step(batch: int) -> None:
            optimizer.zero_grad(set_to_none=True)
            layer(self.ranks[batch]).backward(self.grads[batch])
            optimizer.step()

        return step
