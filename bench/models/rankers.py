"""A Keras model on our sparse rows: agreement with the same model in torch, and speed compared with a plain Keras loop.

A process has one backend of Keras, so each side runs in a process of its own. All begin with the weights of one torch model. The
data are drawn: events of six features with Zipf-distributed ids, and labels by hidden factors.
"""

# Shapes: N events, B events of a batch, F features.

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.embedding.modules import EmbeddingBagCollection, LocalRowSource, TableConfig
from nonet.embedding.tables import TableSpec, make_table
from nonet.errors import ConfigError
from nonet.models import build_model
from nonet.models.deepfm import DeepFM

FEATURES = ("user", "item", "category", "brand", "hour", "page")
_IDS, _DIM, _BATCH, _SEED = 5000, 9, 1000, 3
_HIDDEN = (64, 32)
_RATE = {"sgd": 0.05, "adagrad": 0.05, "adam": 0.003}
_LAYERS = ("dense", "dense_1", "dense_2")


def bench_rankers(steps: int = 200, tensorflow_python: str = "") -> dict[str, Any]:
    """Train DeepFM with torch, JAX and TensorFlow from the same start, and time a Keras step beside a plain Keras loop.

    Args:
        steps: Number of training steps.
        tensorflow_python: An interpreter that has TensorFlow; by default this one.

    Returns:
        By backend and optimizer: the largest relative differences from torch among losses and among the rows of all steps. By
        backend: events per second over those of a plain Keras loop, and the share of a step in which tensors are exchanged.
    """
    pythons = {"jax": sys.executable, "tensorflow": tensorflow_python or sys.executable}
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in _RATE:
            paths = {name: Path(folder) / f"{name}-{optimizer}.npz" for name in ("torch", *pythons)}
            for name, path in paths.items():
                _start(pythons.get(name, sys.executable), "train", name, optimizer, str(steps), str(path))
            expected = dict(np.load(paths["torch"]))
            for name in pythons:
                found = dict(np.load(paths[name]))
                differences = {
                    key: float(np.max(np.abs(found[key] - expected[key]) / np.max(np.abs(expected[key]))))
                    for key in ("losses", "rows")
                }
                rows.append({"backend": name, "optimizer": optimizer, **differences})
        for name, python in pythons.items():
            measured = json.loads(_start(python, "time", name))
            ratios |= {f"{key}, {name}": value for key, value in measured.items()}
    return {"rows": rows, "ratio": ratios}


def _start(python: str, *arguments: str) -> str:
    """Run this module with an interpreter, and return the last line that it prints."""
    done = subprocess.run([python, "-m", __name__, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"bench rankers: {python}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip().rpartition("\n")[2]


def draw_batches(count: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Draw batches of events: ids [B] by feature and labels [B]."""
    draw = np.random.default_rng(_SEED)
    factors = {name: draw.standard_normal((_IDS, 4)) for name in FEATURES}
    batches = []
    for _ in range(count):
        ids = {name: np.minimum(draw.zipf(1.3, _BATCH), _IDS) - 1 for name in FEATURES}
        score = sum(factors[a][ids[a]] * factors[b][ids[b]] for a, b in pairwise(FEATURES))
        label = draw.random(_BATCH) < 1 / (1 + np.exp(-np.sum(score, 1) / 2))
        batches.append(
            (
                {name: torch.from_numpy(values + 1).long() for name, values in ids.items()},
                torch.from_numpy(label.astype(np.float32)),
            )
        )
    return batches


def make_bags(optimizer: str) -> EmbeddingBagCollection:
    """Make the embeddings, one table per feature, whose rows are stepped by a rule of ours."""
    specs = {name: TableSpec(_DIM, optimizer=optimizer, lr=_RATE[optimizer]) for name in FEATURES}
    tables = {name: make_table(name, spec, _SEED) for name, spec in specs.items()}
    configs = {name: TableConfig(spec, (name,), "mean") for name, spec in specs.items()}
    return EmbeddingBagCollection(configs, LocalRowSource(tables)).train()


def make_torch_optimizer(model: DeepFM, name: str) -> torch.optim.Optimizer:
    """Make the optimizer of the dense weights. DeepFM's extra bias is left out, since the Keras model has one bias."""
    weights = [weight for key, weight in model.named_parameters() if key != "bias"]
    if name == "sgd":
        return torch.optim.SGD(weights, _RATE[name])
    if name == "adagrad":
        return torch.optim.Adagrad(weights, _RATE[name], initial_accumulator_value=0.1, eps=1e-7)
    return torch.optim.Adam(weights, _RATE[name], eps=1e-7)


def make_ranker(backend: str, optimizer: str) -> Any:
    """Build DeepFM in Keras with the weights of the torch model."""
    reference = f"{Path(__file__).with_name('_keras_rankers.py')}:build_{optimizer}"
    options = {"use": "keras", "path": reference, "backend": backend, "sequences": [], "length": 1}
    ranker = build_model(options, (), dict.fromkeys(FEATURES, _DIM), _SEED)
    model = DeepFM(dict.fromkeys(FEATURES, _DIM), hidden=_HIDDEN, seed=_SEED)
    linears = [layer for layer in model.mlp if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        for layer, name in zip(linears, _LAYERS, strict=True):
            ranker.get_parameter(f"{name}/kernel").copy_(layer.weight.T)
            ranker.get_parameter(f"{name}/bias").copy_(layer.bias)
    return ranker


def _train(backend: str, optimizer: str, steps: int, path: str) -> None:
    """Train from the common start, and store the losses and all rows."""
    bags = make_bags(optimizer)
    if backend == "torch":
        model: Any = DeepFM(dict.fromkeys(FEATURES, _DIM), hidden=_HIDDEN, seed=_SEED)
        dense = make_torch_optimizer(model, optimizer)
    else:
        model = make_ranker(backend, optimizer)
        dense = model.make_optimizer(0.0)
        dense.param_groups[0]["lr"] = _RATE[optimizer]
    losses = []
    for step, (ids, label) in enumerate(draw_batches(steps)):
        loss = model.compute_loss(bags(ids), label) / _BATCH
        dense.zero_grad()
        loss.backward()
        dense.step()
        bags.push(step + 1)
        losses.append(loss.item())
    keys = torch.arange(1, _IDS + 1)
    with torch.no_grad():
        rows = torch.cat([bags.source.pull(name, keys, train=False) for name in FEATURES])
    np.savez(path, losses=np.array(losses), rows=rows.numpy())


def _time(backend: str) -> None:
    """Print the events per second over a plain Keras loop, and the share of a step in which tensors are exchanged, as JSON."""
    ranker, bags, batches = make_ranker(backend, "adagrad"), make_bags("adagrad"), draw_batches(64)
    dense = ranker.make_optimizer(0.0)
    dense.param_groups[0]["lr"] = _RATE["adagrad"]
    exchanged = 0.0

    def measure(function: Any) -> Any:
        def call(tensor: Any) -> Any:
            nonlocal exchanged
            begun = time.perf_counter()
            result = function(tensor)
            exchanged += time.perf_counter() - begun
            return result

        return call

    library = ranker.compiled.backend
    library.import_tensor, library.export_tensor = map(
        measure, (library.import_tensor, library.export_tensor)
    )

    def take_our_step(turn: int) -> None:
        ids, label = batches[turn % len(batches)]
        loss = ranker.compute_loss(bags(ids), label) / _BATCH
        dense.zero_grad()
        loss.backward()
        dense.step()
        bags.push(turn + 1)

    from nonet.bench.models._keras_rankers import make_plain_step

    take_plain_step = make_plain_step(ranker, FEATURES, _IDS, _DIM, _RATE["adagrad"], batches)
    seconds: dict[str, list[float]] = {"ours": [], "plain": [], "exchange": []}
    for turn in range(160):
        for name, step in (("ours", take_our_step), ("plain", take_plain_step)):
            exchanged = 0.0
            begun = time.perf_counter()
            step(turn)
            seconds[name].append(time.perf_counter() - begun)
            if name == "ours":
                seconds["exchange"].append(exchanged)
    medians = {name: statistics.median(values[32:]) for name, values in seconds.items()}
    print(
        json.dumps(
            {
                "events/s over a plain Keras loop": medians["plain"] / medians["ours"],
                "exchange / step": medians["exchange"] / medians["ours"],
            }
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "train":
        _train(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        _time(sys.argv[2])
