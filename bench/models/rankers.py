"""A Keras model on our sparse rows: agreement with the same model in torch, and speed compared with a plain Keras loop.

A process has one backend of Keras, so each side runs in a process of its own. All begin with the weights of one torch model. The
data are drawn: events of six features with Zipf-distributed ids, and labels by hidden factors.
"""

# Shapes: B events of a batch.

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise, product
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
_IDS, _DIM, _BATCH = 5000, 9, 1000
_ROW_EPS = 1e-6  # Without it, the first step of Adagrad and Adam is the sign of a gradient, and of its rounding where that is 0.
_HIDDEN = (64, 32)
_RATE = {"sgd": 0.05, "adagrad": 0.05, "adam": 0.003}
_ACTIVATIONS = ("relu", "tanh")  # ReLU has a kink, where rounding decides between gradients.
_LAYERS = ("dense", "dense_1", "dense_2")


def bench_rankers(steps: int = 200, starts: int = 5, tensorflow_python: str = "") -> dict[str, Any]:
    """Train DeepFM with torch, JAX and TensorFlow from the same start, and time a Keras step beside a plain Keras loop.

    Args:
        steps: Number of training steps.
        starts: Number of starts and data sets.
        tensorflow_python: An interpreter that has TensorFlow; by default this one.

    Returns:
        By backend and optimizer: the medians over starts of the largest relative differences from torch, among the losses of all
        steps and among the rows after them. By backend: events per second over those of a plain Keras loop, and the share of a
        step in which rows and gradients of the loss are exchanged.
    """
    pythons = {"jax": sys.executable, "tensorflow": tensorflow_python or sys.executable}
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("torch", *pythons):
            _start(pythons.get(name, sys.executable), "train", name, str(steps), str(starts), folder)
        for name in pythons:
            for optimizer, activation in product(_RATE, _ACTIVATIONS):
                pairs = [
                    [
                        np.load(Path(folder) / f"{each}-{optimizer}-{activation}-{seed}.npz")
                        for each in (name, "torch")
                    ]
                    for seed in range(starts)
                ]
                differences = {
                    key: statistics.median(_compare(found[key], expected[key]) for found, expected in pairs)
                    for key in ("losses", "rows")
                }
                rows.append(
                    {"backend": name, "optimizer": optimizer, "activation": activation, **differences}
                )
        for name, python in pythons.items():
            measured = json.loads(_start(python, "time", name))
            ratios |= {f"{key}, {name}": value for key, value in measured.items()}
    return {"rows": rows, "ratio": ratios}


def _compare(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value."""
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


def _start(python: str, *arguments: str) -> str:
    """Run this module with an interpreter, and return the last line that it prints."""
    done = subprocess.run([python, "-m", __name__, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"bench rankers: {python}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip().rpartition("\n")[2]


def draw_batches(count: int, seed: int = 0) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Draw batches of events: ids [B] by feature and labels [B]."""
    draw = np.random.default_rng(seed)
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


def make_bags(optimizer: str, seed: int = 0) -> EmbeddingBagCollection:
    """Make the embeddings, one table per feature, whose rows are stepped by a rule of ours."""
    eps = None if optimizer == "sgd" else _ROW_EPS
    spec = TableSpec(_DIM, optimizer=optimizer, lr=_RATE[optimizer], eps=eps)
    specs = dict.fromkeys(FEATURES, spec)
    tables = {name: make_table(name, spec, seed) for name, spec in specs.items()}
    configs = {name: TableConfig(spec, (name,), "mean") for name, spec in specs.items()}
    return EmbeddingBagCollection(configs, LocalRowSource(tables)).train()


def make_torch_optimizer(model: DeepFM, name: str) -> torch.optim.Optimizer:
    """Make the optimizer of a name for the dense weights. DeepFM's extra bias is left out, since the Keras model has one bias."""
    weights = [weight for key, weight in model.named_parameters() if key != "bias"]
    if name == "sgd":
        return torch.optim.SGD(weights, _RATE[name])
    if name == "adagrad":
        return torch.optim.Adagrad(weights, _RATE[name], initial_accumulator_value=0.1, eps=1e-7)
    return torch.optim.Adam(weights, _RATE[name], eps=1e-7)


def make_model(activation: str, seed: int) -> DeepFM:
    """Build DeepFM in torch, with an activation ("relu" or "tanh") of its hidden layers."""
    model = DeepFM(dict.fromkeys(FEATURES, _DIM), hidden=_HIDDEN, seed=seed)
    for place, layer in enumerate(_get_layers(model)):
        if activation == "tanh" and isinstance(layer, torch.nn.ReLU):
            _get_layers(model)[place] = torch.nn.Tanh()
    return model


def _get_layers(model: DeepFM) -> torch.nn.Sequential:
    """Return the layers of the MLP of a model of one task."""
    assert isinstance(model.mlp, torch.nn.Sequential)
    return model.mlp


def make_ranker(backend: str, optimizer: str, activation: str = "relu", seed: int = 0) -> Any:
    """Build DeepFM in Keras with the weights of the torch model."""
    reference = f"{Path(__file__).with_name('_keras_rankers.py')}:build_{optimizer}_{activation}"
    options = {"use": "keras", "path": reference, "backend": backend, "sequences": [], "length": 1}
    ranker = build_model(options, (), dict.fromkeys(FEATURES, _DIM), seed)
    torch_model = make_model(activation, seed)
    linears = [layer for layer in _get_layers(torch_model) if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        for layer, name in zip(linears, _LAYERS, strict=True):
            ranker.get_parameter(f"{name}/kernel").copy_(layer.weight.T)
            ranker.get_parameter(f"{name}/bias").copy_(layer.bias)
    return ranker


def _train_and_store(
    backend: str, optimizer: str, activation: str, steps: int, seed: int, path: Path
) -> None:
    """Train from the common start of a seed, and store the losses and all rows."""
    bags = make_bags(optimizer, seed)
    if backend == "torch":
        model: Any = make_model(activation, seed)
        dense = make_torch_optimizer(model, optimizer)
    else:
        model = make_ranker(backend, optimizer, activation, seed)
        dense = model.make_optimizer(0.0)
        dense.param_groups[0]["lr"] = _RATE[optimizer]
    losses = []
    for step, (ids, label) in enumerate(draw_batches(steps, seed)):
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


def _print_speeds(backend: str) -> None:
    """Print the events per second over a plain Keras loop, and the share of a step in which tensors are exchanged, as JSON."""
    ranker, bags, batches = make_ranker(backend, "adagrad"), make_bags("adagrad"), draw_batches(64)
    dense = ranker.make_optimizer(0.0)
    dense.param_groups[0]["lr"] = _RATE["adagrad"]
    seconds: dict[str, list[float]] = {"ours": [], "plain": [], "exchange": []}
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
        seconds["exchange"].append(exchanged)
        dense.zero_grad()
        loss.backward()
        dense.step()
        bags.push(turn + 1)

    from nonet.bench.models._keras_rankers import make_plain_step

    take_plain_step = make_plain_step(FEATURES, _IDS, _DIM, _RATE["adagrad"], batches)
    for turn in range(160):
        for name, step in (("ours", take_our_step), ("plain", take_plain_step)):
            exchanged = 0.0
            begun = time.perf_counter()
            step(turn)
            seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(values[32:]) for name, values in seconds.items()}
    print(
        json.dumps(
            {
                "events/s over a plain Keras loop": medians["plain"] / medians["ours"],
                "exchange / step": medians["exchange"] / medians["ours"],
            }
        )
    )


def main() -> None:
    """Do what the arguments say: train NAME STEPS SEEDS FOLDER, or time NAME."""
    torch.set_num_threads(1)
    work, name, *others = sys.argv[1:]
    if work == "time":
        _print_speeds(name)
        return
    steps, seeds, folder = others
    for optimizer, activation, seed in product(_RATE, _ACTIVATIONS, range(int(seeds))):
        path = Path(folder) / f"{name}-{optimizer}-{activation}-{seed}.npz"
        _train_and_store(name, optimizer, activation, int(steps), seed, path)


if __name__ == "__main__":
    main()
