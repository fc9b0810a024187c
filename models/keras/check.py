"""Builds a ranker in a process of its own, as a check before a run: in the interpreter that will train it.

    python -m nonet.models.keras.check '{"options": {...}, "features": {...}, "weight_decay": {...}, "trust": {...}}'

It takes one step, and builds the model again from the configuration that a checkpoint has. It prints {"parameters": n} or
{"error": message} as its last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nonet
from nonet.errors import ConfigError, NonetError
from nonet.trust import TrustState, list_trust, take_trust

if TYPE_CHECKING:
    from nonet.models.keras.ranker import KerasRanker

_TIMEOUT_S = 300.0  # TensorFlow alone takes 10 s to import on a cold machine.


def check_ranker(
    python: str,
    options: Mapping[str, Any],
    features: Mapping[str, int],
    weight_decay: Mapping[str, float] | None = None,
) -> int:
    """Build and step a ranker in another process, and return the number of its parameters.

    Args:
        python: The interpreter.
        options: Options of `build`.
        features: Width of the rows of each feature.
        weight_decay: The weight decay of stages whose scenario sets one, by the key in the scenario.

    Raises:
        ConfigError: It cannot be built or stepped; the message is one line.
    """
    sources = str(Path(nonet.__path__[0]).parent)
    paths = os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH", "")]))
    request = {
        "options": dict(options),
        "features": dict(features),
        "weight_decay": dict(weight_decay or {}),
        "trust": asdict(list_trust(on_this_node=True)),
    }
    try:
        done = subprocess.run(
            [python, "-m", __name__, json.dumps(request)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"model.path: {python} did not build and step the model within {_TIMEOUT_S:g} s; look for a call that waits"
        ) from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(f"model.path: the model cannot be built by {python}: {reason[:300]}")
    result = json.loads(lines[-1])
    if error := result.get("error"):
        raise ConfigError(error)
    return int(result["parameters"])


def main() -> None:
    """Build and step the ranker that the argument describes, and print the result as JSON."""
    request = json.loads(sys.argv[1])
    take_trust(TrustState(**request.pop("trust")))
    try:
        result: dict[str, Any] = {"parameters": build_and_step(**request)}
    except NonetError as error:
        result = {"error": str(error)}
    print(json.dumps(result))


def build_and_step(
    options: Mapping[str, Any], features: Mapping[str, int], weight_decay: Mapping[str, float]
) -> int:
    """Build and step a ranker in this process (`check_ranker`), and return the number of its parameters."""
    from nonet.models.keras.builder import build

    ranker = build(options, (), features, 0)
    check_weight_decay(ranker, weight_decay)
    again = build({**options, **ranker.stored_options}, (), features, 0)
    check_steps(ranker, again)
    return sum(weight.numel() for weight in ranker.parameters())


def check_weight_decay(ranker: KerasRanker, weight_decay: Mapping[str, float]) -> None:
    """Raise ConfigError if a stage sets a weight decay, and the model is compiled with an optimizer, which has its own."""
    optimizer = ranker.compiled.optimizer
    for key, value in weight_decay.items() if optimizer is not None else ():
        raise ConfigError(
            f"{key}: {value:g} has no effect, since the model is compiled with {type(optimizer).__name__}; set its weight_decay "
            "instead, and remove the key"
        )


def check_steps(ranker: KerasRanker, again: KerasRanker) -> None:
    """Take a step with a ranker, and check that its configuration makes the same model again.

    Args:
        ranker: The ranker.
        again: A ranker that was built from its configuration.

    Raises:
        ConfigError: The step fails, or the other ranker computes something else with the same weights.
    """
    import torch

    from nonet.models.keras.probes import ModelProbe

    rows, n_outputs = ModelProbe.draw_rows(ranker.compiled), ranker.compiled.n_outputs
    label = torch.ones(len(next(iter(rows.values()))), n_outputs).squeeze(1)
    title = f"model.path: {Path(ranker.stored_options['path']).name}"
    try:
        optimizer = ranker.make_optimizer(0.0)
        ranker.compute_loss(rows, label).backward()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        again.load_state_dict(ranker.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        outputs = [
            ModelProbe(each.compiled, list(each.parameters()), list(each.buffers())).predict(rows)
            for each in (ranker, again)
        ]
    except NonetError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{title}: a step of the model fails: {type(error).__name__}: {reason}") from error
    if not torch.allclose(*outputs, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise ConfigError(
            f"{title}: Keras makes another model from the model's configuration, from which checkpoints are loaded; give layers "
            "of your own a get_config that has all of their arguments, and Normalization its mean and variance"
        )


if __name__ == "__main__":
    main()
