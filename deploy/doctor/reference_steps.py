"""Real steps of a small SID decoder, each with the work it is: what `nonet doctor --calibrate` times.

Random items, histories of one length, one torch thread; shapes differ where a measure has to tell costs apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.controller.predict import Shape, StepCost, decode_cost, train_cost, update_cost
from nonet.models import build_model
from nonet.models.generation import Trie, beam_search, log_prob
from nonet.models.sid_decoder import sid_loss
from nonet.random import rng
from nonet.types import Jagged, SampleBatch
from nonet.workers.engines import EngineRuntime, make_engine
from nonet.workers.runtime import Membership

# Shapes: U users, W beams, L levels.
_ITEMS, _CODES, _LEVELS, _DIM, _SEED = 3000, 64, 3, 32, 7
_HISTORY = 45


def train_step(
    width: int, layers: int, sequences: int, events: int, ahead: int
) -> tuple[StepCost, Callable[[], None]]:
    """A supervised step: forward, backward, optimizer."""
    model, dense, trie, sids = probe_model(width, layers)
    batch, rows = probe_batch(sids, sequences, events)

    def step() -> None:
        loss, count = sid_loss(model, batch, rows, trie, ahead=ahead)
        (loss / count).backward()
        dense.clip()
        dense.step(1e-4)

    model.train()
    positions = sequences * (events + 1)
    work = train_cost(Shape(width, layers, _LEVELS, _CODES), positions, sequences * events, ahead)
    return work, step


def decode_step(width: int, layers: int, users: int, beams: int) -> tuple[StepCost, Callable[[], None]]:
    """A rollout."""
    model, _, trie, sids = probe_model(width, layers)
    batch, rows = probe_batch(sids, users, _HISTORY)
    seen = Jagged(batch.item.values, batch.item.offsets)

    @torch.no_grad()
    def roll() -> None:
        beam_search(model, model.prefill(batch, rows), trie, beams, forbidden=seen)

    model.eval()
    work = decode_cost(Shape(width, layers, _LEVELS, _CODES), users, _HISTORY, beams)
    return work, roll


def update_step(width: int, layers: int, users: int, beams: int) -> tuple[StepCost, Callable[[], None]]:
    """An RL step of a trainer."""
    model, dense, trie, sids = probe_model(width, layers)
    batch, rows = probe_batch(sids, users, _HISTORY)
    chosen = torch.from_numpy(rng(_SEED, "beams").integers(0, _ITEMS, (users, beams)))
    sids_UWL = torch.from_numpy(sids)[chosen].long()

    def step() -> None:
        with torch.no_grad():
            reference = log_prob(model, batch, rows, sids_UWL, trie)
        (log_prob(model, batch, rows, sids_UWL, trie) - reference).sum().backward()
        dense.clip()
        dense.step(1e-4)

    model.eval()
    work = update_cost(Shape(width, layers, _LEVELS, _CODES), users, _HISTORY, beams)
    return work, step


def probe_model(width: int, layers: int) -> tuple[Any, EngineRuntime, Trie, np.ndarray]:
    """A model, its optimizer, and a catalogue of random items."""
    flat = rng(_SEED, "catalogue").permutation(_CODES**_LEVELS)[:_ITEMS]
    sids = np.stack([flat // _CODES**level % _CODES for level in range(_LEVELS)], 1).astype(np.int32)
    codes = [_CODES] * _LEVELS
    options = {"use": "sid_decoder", "width": width, "layers": layers, "heads": 4}
    model = build_model(options, codes, {"item": _DIM, "user": _DIM}, _SEED)
    return model, make_engine({}, model, Membership(0, 1)), Trie.build(sids, codes), sids


def probe_batch(sids: np.ndarray, sequences: int, events: int) -> tuple[SampleBatch, dict[str, Tensor]]:
    """Sequences of random items, all of one length, and their sparse rows."""
    total = sequences * events
    offsets = torch.arange(0, total + 1, events)
    item = torch.from_numpy(rng(_SEED, "items", total).integers(0, len(sids), total))
    batch = SampleBatch(
        item=Jagged(item, offsets),
        sid=torch.from_numpy(sids)[item].long(),
        time=Jagged(torch.arange(total) * 3600, offsets),
        event=Jagged(torch.zeros(total, dtype=torch.int64), offsets),
        context={"user": torch.arange(sequences)},
        loss_mask=Jagged(torch.ones(total, dtype=torch.bool), offsets),
        target=None,
        uid=[""] * sequences,
    )
    rows = {
        "item": torch.zeros(total, _DIM, requires_grad=True),
        "user": torch.zeros(sequences, _DIM, requires_grad=True),
    }
    return batch, rows
