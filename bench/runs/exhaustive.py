"""Exhaustive scoring of a catalogue with the shape of Amazon Beauty, in three ways that give the same scores.

`all codes` computes and normalises the logits of every code behind every node, a few nodes at a time. `steps` calls
the model for the same logits and keeps the legal ones. `compute_legal_logits` is the decoder's own way, which computes only
those.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nonet.bench.timing import measure_milliseconds

_PAIRS = 6500  # of a prompt and a node that `all codes` holds at once: 32 MiB with 256 codes


def bench_exhaustive(
    items: int = 12_000, codes: int = 256, width: int = 64, prompts: int = 64, rounds: int = 5
) -> dict[str, Any]:
    """Return the milliseconds of a prompt in one thread, in turn, and the largest difference of any score in nats."""
    import torch

    from nonet.models import build_model
    from nonet.models.generation import Trie, score_items

    sids, sizes = draw_beauty_like_sids(items, codes)
    trie = Trie.build(sids, sizes)
    model = build_model({"width": width, "layers": 1}, sizes, {}, seed=0).eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for weight in model.parameters():  # the hashed rows begin at zero
            torch.nn.init.normal_(weight, std=0.2)
        cache = model.depth.cache(torch.randn(prompts, width), torch.arange(prompts + 1))

    class Plain:
        """The same model with `step` alone."""

        codes, step = model.codes, staticmethod(model.step)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calls: dict[str, Any] = {
            "all codes": lambda: _score_all_codes(model, cache, trie),
            "steps": lambda: score_items(Plain(), cache, trie),  # type: ignore[arg-type]
            "legal_logits": lambda: score_items(model, cache, trie),
        }
        scores = [call() for call in calls.values()]
        taken = {name: value / prompts for name, value in measure_milliseconds(calls, rounds).items()}
    finally:
        torch.set_num_threads(threads)
    row = {
        "items": items,
        "codes": "x".join(map(str, sizes)),
        "nodes with a choice": [int((np.diff(first) > 1).sum()) for first in trie.first_child],
        "apart": max(float((each - scores[0]).abs().max()) for each in scores[1:]),
    }
    ratio = {
        f"all codes / {name}": taken["all codes CPU"] / taken[f"{name} CPU"]
        for name in ("steps", "legal_logits")
    }
    return {"rows": [row | taken], "ratio": ratio}


def _score_all_codes(model: Any, cache: Any, trie: Any) -> Any:
    """Return scores [U, I] by a masked softmax over all codes of each node."""
    import torch

    answer = torch.empty(len(cache.state), trie.n_items)
    with torch.no_grad():
        nodes = [torch.from_numpy(np.flatnonzero(np.diff(first) > 1)) for first in trie.first_child]
        few = max(1, _PAIRS // max(map(len, nodes)))
        for user in range(0, len(answer), few):
            some = cache.select_prompts(user, min(user + few, len(answer)))
            logp = torch.zeros(len(some.state), 1)
            for level, chosen in enumerate(nodes):
                logp = logp[:, torch.repeat_interleave(trie.get_tensor("first_child", level).diff())]
                for start in range(0, len(chosen), _PAIRS):
                    part = chosen[start : start + _PAIRS]
                    child = trie.find_children(level, part)
                    prefix = trie.decode_prefixes(level, part).expand(len(some.state), -1, -1)
                    logits = model.step(some, prefix, level).masked_fill(child < 0, -torch.inf)
                    logp.index_add_(1, child[child >= 0], logits.log_softmax(-1)[:, child >= 0])
            answer[user : user + few] = logp[:, trie.get_tensor("leaf_of_item", 0)]
    return answer


def draw_beauty_like_sids(items: int, codes: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Draw semantic ids [items, 4] of three skewed levels and a collision level, distributed like k-means codes of Beauty."""
    rng = np.random.default_rng(0)
    near, deep = (1 / (np.arange(codes) + begin) ** 1.15 for begin in (codes / 4, 1))
    first = rng.choice(codes, items, p=near / near.sum())
    second, third = (rng.choice(codes, items, p=deep / deep.sum()) for _ in range(2))
    second = (second + 7 * first) % codes  # behind other codes others are frequent
    three = np.stack([first, second, (third + 3 * first + 5 * second) % codes], 1)
    order = np.lexsort(three.T[::-1])
    opens = np.r_[True, (three[order][1:] != three[order][:-1]).any(1)]
    place = np.arange(items) - np.maximum.accumulate(np.where(opens, np.arange(items), 0))
    same = np.empty(items, np.int64)
    same[order] = place
    return np.column_stack([three, same]), (codes, codes, codes, int(same.max()) + 1)
