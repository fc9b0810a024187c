"""Training steps of a Qwen3-shaped backbone on the histories of a log, with sequences packed behind one another and padded.

Each engine takes packed and padded steps in turn, with the same weights, which are drawn. The utilisation (MFU) is the rate of
the model's own operations (`StepMeter`) over that of a matrix product measured in the same precision on the same device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nonet.bench.runs import read_yoochoose
from nonet.bench.timing import measure_in_turns
from nonet.models import build_model
from nonet.models.generation import Trie, move_batch
from nonet.models.hf import set_packing
from nonet.models.sid_decoder import compute_sid_loss
from nonet.random import rng
from nonet.samples.tables import read_interactions
from nonet.types import Jagged, SampleBatch
from nonet.workers.devices import get_device
from nonet.workers.engines import (
    OptimizerOptions,
    PrecisionOptions,
    StepMeter,
    StepPrecision,
    make_engine,
    measure_matmul_rate,
)
from nonet.workers.runtime import Membership

_CODES = (256, 256, 256)
_LR = 1e-4
# Width, layers, heads, key/value heads, width of a head, feed-forward width. All but the first are Qwen3's.
_SHAPES = {
    "small": (128, 4, 4, 2, 32, 384),
    "0.6b": (1024, 28, 16, 8, 128, 3072),
    "1.7b": (2048, 28, 16, 8, 128, 6144),
    "4b": (2560, 36, 32, 8, 128, 9728),
}
_MAX_EVENTS = 50  # Events of a history, as in the quickstart.


def bench_backbone(
    data: str = "",
    size: str = "small",
    engines: str = "ddp",
    sequences: int = 64,
    steps: int = 4,
    rounds: int = 5,
    precision: str = "fp32",
    weights: str = "fp32",
    optimizer: str = "adamw",
    padded: bool = True,
    device: str = "cpu",
) -> dict[str, Any]:
    """Time steps of each engine.

    Args:
        data: Folder with Yoochoose's train_full.tsv; "" for the shipped MovieLens log.
        size: Shape of the backbone: small, 0.6b, 1.7b or 4b.
        engines: Engines, separated by `;`, each with its flags: `ddp;ddp recompute;ddp compile`.
        sequences: Number of histories of a step.
        steps: Number of steps of a round.
        rounds: Number of timed rounds of each side.
        precision: Precision of the losses: fp32, bf16 or fp16.
        weights: Precision of the backbone's weights, which have fp32 masters.
        optimizer: adamw or muon.
        padded: Whether padded steps are timed too.
        device: Device of the model.

    Returns:
        For each engine: events per second and milliseconds of a step of each side, the MFU and the peak memory of
        packed steps, and the difference of the first losses. The ratios are events per second, packed over padded.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    batches, trie = make_batches(read_histories(data), sequences, steps)
    rows: list[dict[str, Any]] = []
    for name in engines.split(";"):
        stepper = _Stepper(name, make_model(size, weights, device), trie, precision, optimizer, device)
        rows.append({"engine": name} | _measure(stepper, batches, steps, rounds, padded))
        del stepper
    ratio = {
        f"{row['engine']}: packed / padded": row["packed events/s"] / row["padded events/s"]
        for row in rows
        if padded
    }
    return {"rows": rows, "ratio": ratio}


class _Stepper:
    """A model and its engine on one rank.

    Args:
        engine: Name of the engine and its flags, separated by spaces.
        model: The model.
        trie: The catalogue.
        precision: Precision of the losses.
        optimizer: Name of the optimizer.
        device: Device of the model.
    """

    def __init__(self, engine: str, model: Any, trie: Trie, precision: str, optimizer: str, device: str):
        self.model, self.trie, self.device = model.train(), trie, device
        self.precision = StepPrecision(PrecisionOptions.model_validate({"use": precision}))
        name, *flags = engine.split()
        options = {"use": name, **dict.fromkeys(flags, True)}
        self.meter = StepMeter()
        self.meter.watch(model)
        learning = OptimizerOptions.model_validate({"use": optimizer})
        self.engine = make_engine(options, model, Membership(0, 1), learning)
        self.engine.restart()

    def compute_loss(self, batch: SampleBatch) -> torch.Tensor:
        """Compute the mean loss of a batch in nats."""
        with self.precision.cast(self.device):
            loss, count = compute_sid_loss(self.engine.model, batch, {}, self.trie)
        return loss / count

    def take_step(self, batch: SampleBatch) -> None:
        """Take a step on a batch."""
        self.engine.backward(self.compute_loss(batch))
        self.engine.clip()
        self.engine.step(_LR)


def make_model(size: str, weights: str, device: str) -> Any:
    """Draw a recommender with a Qwen3-shaped backbone on a device."""
    width, layers, heads, kv_heads, head_width, feed_forward = _SHAPES[size]
    config = {
        "model_type": "qwen3", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_width, "intermediate_size": feed_forward, "vocab_size": 1000,
    }  # fmt: skip
    with torch.device(device):
        return build_model({"use": "hf", "config": config, "precision": weights}, _CODES, {}, seed=0).to(
            device
        )


def _measure(
    stepper: _Stepper, batches: list[SampleBatch], steps: int, rounds: int, padded: bool
) -> dict[str, Any]:
    """Time the steps of one engine."""
    device = get_device(stepper.device)
    batches = [move_batch(batch, stepper.device) for batch in batches]
    events = sum(int(batch.item.offsets[-1]) for batch in batches)

    def take_steps(packs: bool) -> None:
        """Take a step on each batch, with packed or padded sequences."""
        set_packing(stepper.model.backbone, packs=packs)
        for batch in batches:
            stepper.take_step(batch)
        device.synchronize()

    with torch.no_grad():
        losses = []
        for packs in (True, False):
            set_packing(stepper.model.backbone, packs=packs)
            losses.append(float(stepper.compute_loss(batches[0])))
    take_steps(packs=True)
    stepper.meter.take_counts()
    take_steps(packs=True)
    flops = stepper.meter.take_counts()["flops"]
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in stepper.model.parameters()), "events": events}
    if stepper.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        take_steps(packs=True)
        row["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    sides = {"packed": True, "padded": False} if padded else {"packed": True}
    timers = measure_in_turns({name: lambda p=p: take_steps(p) for name, p in sides.items()}, rounds)
    for name, timer in timers.items():
        seconds = timer.compute_median_s()
        row |= {f"{name} events/s": events / seconds, f"{name} ms": 1000 * seconds / steps}
        row[f"{name} MFU"] = flops / seconds / measure_matmul_rate(stepper.device, stepper.precision.use)
    return row | {"losses apart": abs(losses[0] / losses[1] - 1)}


def read_histories(data: str) -> list[np.ndarray]:
    """Return the items of each user's newest events, in the order of time."""
    if data:
        log = read_yoochoose(Path(data) / "train_full.tsv")[0]
    else:
        log = read_interactions(
            "builtin:movielens-small/interactions.parquet", only=["user_id", "item_id", "timestamp"]
        )
    log = log.sort_by([("user_id", "ascending"), ("timestamp", "ascending")])
    _, item = np.unique(log["item_id"].to_numpy(), return_inverse=True)
    _, first = np.unique(log["user_id"].to_numpy(), return_index=True)
    return [history[-_MAX_EVENTS:] for history in np.split(item, first[1:])]


def make_batches(histories: list[np.ndarray], sequences: int, steps: int) -> tuple[list[SampleBatch], Trie]:
    """Return batches of random histories whose events are all targets, and a catalogue of drawn semantic ids.

    Histories are repeated if there are fewer than all batches need.
    """
    dice = rng(0, "bench", "backbone")
    n_items = 1 + max(int(history.max()) for history in histories)
    number = dice.permutation(np.prod(_CODES))[:n_items]
    sids = np.stack(np.unravel_index(number, _CODES), axis=1)
    chosen = np.resize(dice.permutation(len(histories)), (steps, sequences))
    return [_make_batch([histories[user] for user in users], sids) for users in chosen], Trie.build(
        sids, _CODES
    )


def _make_batch(histories: list[np.ndarray], sids: np.ndarray) -> SampleBatch:
    """Return the batch of some histories."""
    item = torch.from_numpy(np.concatenate(histories))
    offsets = torch.tensor([0, *np.cumsum([len(history) for history in histories])])
    zero = torch.zeros(len(item), dtype=torch.int64)
    return SampleBatch(
        item=Jagged(item, offsets),
        sid=torch.from_numpy(sids)[item].long(),
        time=Jagged(zero, offsets),
        event=Jagged(zero, offsets),
        context={},
        loss_mask=Jagged(torch.ones(len(item), dtype=torch.bool), offsets),
        target=None,
        uid=[str(index) for index in range(len(histories))],
    )
