"""The baseline of serving: `generate` of Hugging Face behind Ray Serve's `@serve.batch`, with a trie that works on whole tensors.

A GPT-2 with the run's width, layers and heads reads the codes of a history, one position per code, and runs a beam search with as
many beams as the run for the codes of one item. A table of valid next codes by node is read for all beams at once; one gather per
step follows the nodes of the beams. The weights are random, since only the speed is measured.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nonet.models.generation import Trie

# Of `@serve.batch`. A batch of 16 requests takes 3 s, so larger batches only increase the p99.
MAX_BATCH, WAIT_S = 4, 0.0


class TrieProcessor:
    """A logits processor that sets the scores of illegal codes to -inf.

    Args:
        trie: The catalogue.
        prompt: Number of positions before the codes that are searched.
        first: Token id of the first code.

    Attributes:
        child: Child node [nodes, vocabulary] of all levels, -1 where illegal.
    """

    def __init__(self, trie: Trie, prompt: int, first: int = 1):
        self._prompt = prompt
        starts = np.cumsum([0, *trie.n_nodes])
        offsets = np.cumsum([first, *trie.codes])
        self._leaves = int(starts[trie.levels])
        child = torch.full((int(starts[-1]), int(offsets[-1])), -1, dtype=torch.int64)
        for level in range(trie.levels):
            nodes = torch.arange(trie.n_nodes[level])
            row, code, below = trie.list_children(level, nodes)
            child[int(starts[level]) + row, int(offsets[level]) + code] = int(starts[level + 1]) + below
        self.child, self.vocabulary = child, int(offsets[-1])

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with illegal codes set to -inf."""
        node = self._find_node(ids[:, self._prompt :])
        return scores.masked_fill(self.child[node] < 0, -torch.inf)

    def find_leaf(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the leaf of each row of token ids [B, L], below 0 for ids that are not valid."""
        return self._find_node(codes) - self._leaves

    def _find_node(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the node of each row of token ids [B, l], numbered over all levels; 0, the root, for ids that are not valid."""
        node = torch.zeros(len(codes), dtype=torch.int64)
        for code in codes.unbind(1):
            node = self.child[node, code].clamp_min(0)
        return node


class HuggingFace:
    """A Hugging Face model; `submit(history)` returns beams of that history's next item.

    Args:
        trie: The catalogue.
        sids: Semantic ids of all items.
        width: Width of the model.
        layers: Number of layers.
        heads: Number of heads.
        events: Events of a history.
        beams: Number of beams.
        here: Whether requests are batched in this process; if not, only `generate` is used.
    """

    def __init__(
        self,
        trie: Trie,
        sids: np.ndarray,
        width: int,
        layers: int,
        heads: int,
        events: int,
        beams: int,
        here: bool = True,
    ):
        from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessorList

        offsets = np.cumsum([1, *trie.codes])[:-1]
        self._codes = torch.from_numpy(sids.astype(np.int64) + offsets)
        prompt = events * trie.levels
        self._trie = TrieProcessor(trie, prompt)
        config = GPT2Config(
            vocab_size=self._trie.vocabulary, n_positions=prompt + trie.levels + 1, n_embd=width, n_layer=layers, n_head=heads,
            bos_token_id=0, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        self._model: Any = GPT2LMHeadModel(config).eval()
        self._prompt, self._beams, self._levels = prompt, beams, trie.levels
        self._processors = LogitsProcessorList([self._trie])  # pyright: ignore[reportArgumentType]
        if not here:  # a replica of Ray Serve calls `generate` directly
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._batched = self._wrap_in_serve_batch()

    def submit(self, history: np.ndarray) -> Future[Any]:
        """Submit a history of item indices [n], and return a future of its beams."""
        return asyncio.run_coroutine_threadsafe(self._batched(history), self._loop)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _wrap_in_serve_batch(self) -> Any:
        """Return `generate` behind `@serve.batch` in this process."""
        from ray import serve
        from ray.serve import context
        from ray.serve._private.common import DeploymentID, ReplicaID
        from ray.serve.schema import ReplicaRank

        # The replica's attributes that `@serve.batch` reads. With them it works in this process, without calls between processes.
        config: Any = SimpleNamespace(max_ongoing_requests=1 << 16)
        context._set_internal_replica_context(
            replica_id=ReplicaID("bench", DeploymentID("generate", "bench")), servable_object=self.generate,
            _deployment_config=config, rank=ReplicaRank(rank=0, node_rank=0, local_rank=0), world_size=1,
        )  # fmt: skip

        @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=WAIT_S)
        async def answer(histories: list[np.ndarray]) -> list[Any]:
            return self.generate(histories)

        return answer

    @torch.inference_mode()
    def generate(self, histories: Sequence[np.ndarray]) -> list[Any]:
        """Return the beams [beams, levels] of each history; shorter histories are padded on the left."""
        ids = torch.zeros(len(histories), self._prompt, dtype=torch.int64)
        attention_mask = torch.zeros_like(ids)
        for row, history in enumerate(histories):
            codes = self._codes[torch.from_numpy(history.astype(np.int64))].flatten()[-self._prompt :]
            ids[row, self._prompt - len(codes) :] = codes
            attention_mask[row, self._prompt - max(1, len(codes)) :] = 1
        output = self._model.generate(
            ids, attention_mask=attention_mask, num_beams=self._beams, num_return_sequences=self._beams,
            max_new_tokens=self._levels, min_new_tokens=self._levels, do_sample=False, logits_processor=self._processors,
            pad_token_id=0,
        )  # fmt: skip
        return list(output[:, self._prompt :].unflatten(0, (len(histories), self._beams)))
