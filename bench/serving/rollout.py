"""`nonet bench rollout`: valid beams of a Hugging Face model in users per second, by its own `generate` and by Nonet.

Both sides have the same Qwen3 model, weights, trie, histories and threads, and return items. `generate` runs a batched beam
search with a static cache and renormalize_logits, constrained in two ways: (i) by prefix_allowed_tokens_fn, its own way; (ii)
by a logits processor that reads the valid codes of all beams from one table (`hugging_face.TrieProcessor`). Nonet reads the
history of a prompt once for all beams.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.bench.serving.hugging_face import TrieProcessor
from nonet.bench.timing import measure_in_turns
from nonet.models import build_model
from nonet.models.generation import Trie, search_beams
from nonet.models.hf import build_language_model
from nonet.types import Jagged, SampleBatch

# Shapes: U users, W beams, E events of a history, L levels.
_LEVELS, _CODES = 3, 256  # _CODES per level


def bench_rollout(
    widths: str = "64,256",
    beams: str = "16,64",
    items: int = 10_000,
    users: int = 8,
    events: int = 50,
    layers: int = 4,
    rounds: int = 1,
    stock: bool = True,
) -> dict[str, Any]:
    """Measure both sides by model width and number of beams.

    Args:
        widths: Widths of the model, separated by commas.
        beams: Numbers of beams, separated by commas.
        items: Number of items of the catalogue.
        users: Number of histories.
        events: Number of events of a history.
        layers: Number of layers of the model.
        rounds: Number of timed rounds.
        stock: Whether (i) is measured too, which calls a Python function for every beam and step.
    """
    torch.set_num_threads(1)
    trie, sids = _make_catalogue(items)
    rows: list[dict[str, Any]] = []
    ratio: dict[str, float] = {}
    for width in map(int, str(widths).split(",")):
        sides = _Sides(trie, sids, width, layers, users, events)
        for beam_count in map(int, str(beams).split(",")):
            calls: dict[str, Callable[[], Any]] = {
                "ours": partial(sides.search_ours, beam_count),
                "(ii) table": partial(sides.search_theirs, beam_count),
            }
            if stock:
                calls["(i) prefix_allowed_tokens_fn"] = partial(sides.search_theirs, beam_count, stock=True)
            items_by_call = {name: call() for name, call in calls.items()}  # also warms up
            timers = measure_in_turns(calls, rounds)
            users_s = {name: users / statistics.median(timer.cpu_s) for name, timer in timers.items()}
            row: dict[str, Any] = {"width": width, "beams": beam_count}
            row |= {f"users/s, {name}": value for name, value in users_s.items()}
            row["same items as (ii)"] = _compute_shared_fraction(
                items_by_call["ours"], items_by_call["(ii) table"]
            )
            row["illegal"] = int(sum((item_UW < 0).sum() for item_UW in items_by_call.values()))
            rows.append(row)
            for name in list(calls)[1:]:
                ratio[f"width {width}, {beam_count} beams: ours / {name}"] = users_s["ours"] / users_s[name]
    return {"rows": rows, "ratio": ratio}


def _make_catalogue(items: int) -> tuple[Trie, np.ndarray]:
    """Draw distinct semantic ids, and return their trie and the ids [items, L] int64."""
    generator = np.random.default_rng(7)
    sids = np.unique(generator.integers(0, _CODES, (2 * items, _LEVELS)), axis=0)
    sids = generator.permutation(sids)[:items].astype(np.int64)
    codes = (_CODES,) * _LEVELS
    return Trie.build(sids, codes), sids


class _Sides:
    """One model as Nonet's and as transformers', and random histories [U, E] of items."""

    def __init__(self, trie: Trie, sids: np.ndarray, width: int, layers: int, users: int, events: int):
        from transformers import LogitsProcessorList

        heads = max(1, width // 32)
        config = {
            "model_type": "qwen3", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": heads, "head_dim": 32, "intermediate_size": 3 * width, "initializer_range": 0.1,
        }  # fmt: skip
        options = {"config": config}
        self._trie, self._events = trie, events
        self._model: Any = build_model({"use": "hf", **options}, trie.codes, {}, 7).eval()
        self._language_model: Any = build_language_model(self._model, options, 7).eval()
        history = np.random.default_rng(11).integers(0, len(sids), (users, events))
        self._batch = _make_batch(torch.from_numpy(history), torch.from_numpy(sids[history]))
        self._first = self._model.backbone.words + 1
        offsets = self._first + torch.tensor([_CODES * level for level in range(_LEVELS)])
        codes = (torch.from_numpy(sids[history]) + offsets).flatten(1)
        self._ids = torch.cat([torch.full((users, 1), self._first - 1), codes], 1)
        self._table = TrieProcessor(trie, self._ids.shape[1], first=self._first)
        self._processors = LogitsProcessorList([self._table])  # pyright: ignore[reportArgumentType]
        self._legal: dict[tuple[int, ...], list[int]] = {}  # token ids that may follow each prefix
        for sid in (sids + offsets.numpy()).tolist():
            for level in range(_LEVELS):
                self._legal.setdefault(tuple(sid[:level]), []).append(sid[level])
        self._legal = {prefix: sorted(set(codes)) for prefix, codes in self._legal.items()}

    @torch.inference_mode()
    def search_ours(self, beams: int) -> Tensor:
        """Return the items [U, W] of our beam search."""
        return search_beams(self._model, self._model.prefill(self._batch, {}), self._trie, beams).item

    @torch.inference_mode()
    def search_theirs(self, beams: int, *, stock: bool = False) -> Tensor:
        """Return the items [U, W] of `generate`."""
        prompt = self._ids.shape[1]
        constraint = (
            {"prefix_allowed_tokens_fn": self._list_allowed}
            if stock
            else {"logits_processor": self._processors}
        )
        ids = self._language_model.generate(
            self._ids, attention_mask=torch.ones_like(self._ids), num_beams=beams, num_return_sequences=beams,
            max_new_tokens=_LEVELS, min_new_tokens=_LEVELS, do_sample=False, renormalize_logits=True,
            cache_implementation="static", pad_token_id=0, **constraint,
        )  # fmt: skip
        leaf = self._table.find_leaf(ids[:, prompt:])
        item = self._trie.get_tensor("item_of_leaf", 0)[leaf.clamp_min(0)].masked_fill(leaf < 0, -1)
        return item.view(len(self._ids), beams)

    def _list_allowed(self, row: int, ids: Tensor) -> list[int]:
        """Return the token ids that may follow a beam, as prefix_allowed_tokens_fn."""
        return self._legal[tuple(ids[self._ids.shape[1] :].tolist())]


def _make_batch(item_UE: Tensor, sid_UEL: Tensor) -> SampleBatch:
    """Make a batch of histories."""
    users, events = item_UE.shape
    cuts = torch.arange(users + 1) * events
    none = torch.zeros(users * events, dtype=torch.int64)
    return SampleBatch(
        item=Jagged(item_UE.flatten(), cuts), sid=sid_UEL.flatten(0, 1), time=Jagged(none, cuts), event=Jagged(none, cuts),
        context={}, loss_mask=Jagged(none.bool(), cuts), target=None, uid=[str(user) for user in range(users)],
    )  # fmt: skip


def _compute_shared_fraction(ours_UW: Tensor, theirs_UW: Tensor) -> float:
    """Return the share of beams that both sides have."""
    return float((ours_UW[:, :, None] == theirs_UW[:, None]).any(-1).double().mean())
