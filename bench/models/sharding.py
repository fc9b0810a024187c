"""Training steps of engines on two ranks, compared with a plain loop around PyTorch's fully_shard.

The plain loop shards each block and the root, clips and updates with torch's functions, as PyTorch's own tutorial does. All
sides have the same weights and batches and AdamW, and take turns in two processes over gloo with one thread each. Times are CPU
times of a process, since ranks wait for each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from nonet.bench.embedding import run_as_rank, run_both_ranks
from nonet.bench.models.backbone import make_batches, make_model, read_histories
from nonet.bench.timing import LapTimer
from nonet.models import build_model
from nonet.models.sid_decoder import compute_sid_loss
from nonet.workers.engines import OptimizerOptions, make_engine
from nonet.workers.runtime import Membership

_LR, _WEIGHT_DECAY, _BETAS, _MAX_NORM = 1e-4, 0.01, (0.9, 0.98), 1.0
_ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"use": "fsdp2"},
    "zero 2": {"use": "deepspeed", "zero": 2},
    "ddp": {"use": "ddp"},
}


def bench_sharding(
    models: str = "decoder;qwen3", engines: str = "fsdp2;zero 2;ddp", sequences: int = 32, rounds: int = 9
) -> dict[str, Any]:
    """Time steps of all sides on two ranks.

    Args:
        models: Models, separated by `;`: decoder (of 8 blocks of width 128) and qwen3 (the small shape of `backbone`).
        engines: Engines, separated by `;`.
        sequences: Number of histories of a rank's step.
        rounds: Number of timed steps of each side.

    Returns:
        For each model, milliseconds of a step of each side: medians of the slower rank; and their ratios to the plain loop.
    """
    rows, ratio = [], {}
    for model in models.split(";"):
        ranks = run_both_ranks("nonet.bench.models.sharding", model, engines, sequences, rounds)
        slower = {side: max(rank[side] for rank in ranks) for side in ranks[0]}
        rows.append({"model": model} | {f"{side} ms": value for side, value in slower.items()})
        ratio |= {f"{model}: {side} / plain": slower[side] / slower["plain"] for side in engines.split(";")}
    return {"rows": rows, "ratio": ratio}


def _run_rank(rank: int, model_name: str, engines: str, sequences: str, rounds: str) -> dict[str, float]:
    """Time the steps of all sides on one rank."""
    batches, trie = make_batches(read_histories(""), int(sequences), 2)
    batch = batches[rank]
    member = Membership(rank, 2, trainers=torch.distributed.group.WORLD, n_trainers=2)

    def build() -> Any:
        if model_name == "qwen3":
            return make_model("small", "fp32", "cpu").train()
        options = {"use": "sid_decoder", "width": 128, "layers": 8, "heads": 4, "dropout": 0.0}
        return build_model(options, trie.codes, {}, seed=0).train()

    def compute_loss(model: Any) -> Tensor:
        loss, count = compute_sid_loss(model, batch, {}, trie)
        return loss / (2 * count)

    sides: dict[str, Callable[[], float]] = {"plain": _PlainLoop(build(), compute_loss).take_step}
    for name in engines.split(";"):
        engine = make_engine(
            _ENGINES[name], build(), member, OptimizerOptions.model_validate({"use": "adamw"})
        )
        engine.restart()
        sides[name] = lambda engine=engine: _take_step(engine, compute_loss)
    timers = {name: LapTimer(time.process_time) for name in sides}
    for turn in range(int(rounds) + 2):
        losses = {}
        for name, take_step in sides.items():
            with timers[name]:
                losses[name] = take_step()
        if max(losses.values()) / min(losses.values()) > 1 + 1e-3:
            raise RuntimeError(f"the sides do not train the same model: losses of step {turn} are {losses}")
    return {name: 1e3 * statistics.median(timer.cpu_s[2:]) for name, timer in timers.items()}


def _take_step(engine: Any, compute_loss: Callable[[Any], Tensor]) -> float:
    """Take a step of an engine and return the loss."""
    loss = compute_loss(engine.model)
    engine.backward(loss)
    engine.clip()
    engine.step(_LR)
    return float(loss.detach())


class _PlainLoop:
    """A plain loop around a model that fully_shard divides."""

    def __init__(self, model: Any, compute_loss: Callable[[Any], Tensor]):
        layers = getattr(model, "blocks", None)
        for block in model.backbone.model.model.layers if layers is None else layers:
            fully_shard(block)
        fully_shard(model, reshard_after_forward=False)
        register_fsdp_forward_method(model, "states")
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)
        self.model, self.compute_loss = model, compute_loss
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": _WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=_LR, betas=_BETAS)

    def take_step(self) -> float:
        """Take a step and return the loss."""
        loss = self.compute_loss(self.model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


if __name__ == "__main__":
    run_as_rank(_run_rank)
