"""A tiny random model with the surface of SidModel, and catalogues to search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nonet.random import rng
from nonet.types import Jagged


@dataclass
class Cache:
    state: Tensor  # [U, D]

    def select_prompts(self, start: int, stop: int) -> Cache:
        return Cache(self.state[start:stop])


class FakeSidModel(nn.Module):
    """Compute logits at level l as MLP(state + embeddings of codes before l).

    The batch's only content is rows["user"].
    """

    def __init__(self, codes: tuple[int, ...], width: int, seed: int, dtype: torch.dtype, spread: float):
        super().__init__()
        self.codes, self.levels, self.features = codes, len(codes), {"user": width}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.ModuleList(nn.Embedding(k, width) for k in codes)
            self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in codes)
            self.head = nn.ModuleList(nn.Linear(width, k) for k in codes)
        for head in self.head:
            head.weight.data.mul_(spread)
        self.to(dtype)
        self.steps = 0  # (user, beam) pairs stepped so far

    def prefill(self, batch: object, rows: dict[str, Tensor]) -> Cache:
        return Cache(rows["user"])

    def step(self, cache: Cache, codes: Tensor, level: int) -> Tensor:
        assert codes.shape[0] == len(cache.state)
        assert codes.shape[2] == level
        state = cache.state[:, None, :].expand(-1, codes.shape[1], -1)
        self.steps += state.shape[0] * state.shape[1]
        for before in range(level):
            state = state + self.embed[before](codes[..., before])
        return self.head[level](torch.tanh(self.hidden[level](state)))


@pytest.fixture
def make_model():
    def make(codes, *, width=8, seed=0, dtype=torch.float64, spread=4.0):
        return FakeSidModel(tuple(codes), width, seed, dtype, spread).requires_grad_(True)

    return make


@pytest.fixture
def make_cache():
    def make(users, *, width=8, seed=0, dtype=torch.float64):
        return Cache(torch.from_numpy(rng(seed, "state").standard_normal((users, width))).to(dtype))

    return make


@pytest.fixture
def make_sids():
    """Distinct random SIDs [items, L] over all but a few of the codes."""

    def make(codes, items, *, seed=0):
        flat = rng(seed, "sids").choice(int(np.prod(codes)), size=items, replace=False)
        return np.stack(np.unravel_index(flat, codes), 1).astype(np.int32)

    return make


@pytest.fixture
def jagged():
    def make(lists):
        offsets = np.cumsum([0, *map(len, lists)])
        return Jagged(np.array([x for row in lists for x in row], dtype=np.int64), offsets.astype(np.int64))

    return make


class BruteForce:
    """Compute the constrained distribution and its beam search with Python sets: one user, one prefix at a time."""

    def __init__(self, model, cache, sids, items):
        self.model, self.cache = model, cache
        self.item = {tuple(sids[item].tolist()): int(item) for item in items}

    def conditional(self, user: int, prefix: tuple[int, ...]) -> dict[int, float]:
        """Legal next codes of a prefix and their log-probabilities."""
        level = len(prefix)
        legal = sorted({sid[level] for sid in self.item if sid[:level] == prefix})
        one = Cache(self.cache.state[user : user + 1])
        with torch.no_grad():
            logits = self.model.step(one, torch.tensor([[prefix]], dtype=torch.int64), level)[0, 0].double()
        exps = {code: float(logits[code]) for code in legal}
        top = max(exps.values())
        total = top + np.log(sum(np.exp(x - top) for x in exps.values()))
        return {code: x - total for code, x in exps.items()}

    def log_prob(self, user: int, sid: tuple[int, ...]) -> list[float]:
        return [self.conditional(user, sid[:level])[code] for level, code in enumerate(sid)]

    def beams(self, user: int, width: int, forbidden: set[int]) -> list[tuple[int, tuple[int, ...], float]]:
        """Items, SIDs and total log-probabilities of the beam, best first."""
        live = {sid for sid, item in self.item.items() if item not in forbidden}
        beam = [((), 0.0)]
        for level in range(self.model.levels):
            grown = [
                ((*prefix, code), score + logp)
                for prefix, score in beam
                for code, logp in self.conditional(user, prefix).items()
                if any(sid[: level + 1] == (*prefix, code) for sid in live)
            ]
            beam = sorted(grown, key=lambda entry: -entry[1])[:width]  # stable: ties stay in flat order
        return [(self.item[sid], sid, score) for sid, score in beam]


@pytest.fixture
def brute_force():
    return BruteForce
