"""Build a ranker from the user's function, or from the configuration that a checkpoint has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.errors import ConfigError, NonetError
from nonet.models.keras.backends import load_keras
from nonet.models.keras.compiled import MASK, CompiledModel
from nonet.models.keras.probes import ModelProbe
from nonet.models.keras.ranker import KerasRanker
from nonet.models.keras.structure import check_structure, check_training
from nonet.plugins import HERE, import_file, load_reference, parse_file

ARCHITECTURE = "architecture"
"""The option of `build` that has the configuration of a trained model as JSON."""
_MAX_CACHED = 8  # Configurations whose compiled functions are kept.


def build(
    options: Mapping[str, Any], codes: Sequence[int], features: Mapping[str, int], seed: int
) -> KerasRanker:
    """Build a ranker with initial weights (`ModelSpec.build`); a click model has no codes.

    With `architecture`, the model is made from it and the user's function is not called; Keras refuses configurations that
    contain code. If the user's file is in the folder `sources`, it is imported for the layers that it registers.

    Args:
        options: Options of the model (`KerasOptions`), `length` of sequences, and perhaps `tasks`, `architecture` and
            `sources`.
        codes: Not used.
        features: Width of the rows of each feature.
        seed: Seed of the weights.

    Raises:
        ConfigError: The function cannot be called, or returns something else than a Keras model of these inputs with one logit,
            or with one for the target and each task.
    """
    tasks, from_logits = tuple(options.get("tasks", ())), options.get("from_logits", True)
    shapes = describe_inputs(features, options["sequences"], options["length"])
    reference = Path(options["path"]).name
    title = f"model.path: {reference}"
    # Before any code of the user imports Keras.
    keras, backend = load_keras(options["backend"], torch.get_num_threads())
    if architecture := options.get(ARCHITECTURE):
        if options["sources"]:
            for file in Path(options["sources"]).rglob(str(parse_file(reference))):
                import_file(file, title)
        compiled = _compile_architecture(
            title, options["backend"], architecture, tuple(shapes.items()), 1 + len(tasks), from_logits
        )
        return KerasRanker(compiled, *_copy_values(compiled), reference)
    keras.utils.set_random_seed(seed % (1 << 31))
    keras.backend.clear_session()  # Names of layers, and so of weights, do not depend on what was built before.
    model = _run_keras_code(title, load_reference(options["path"], HERE, title), dict(shapes))
    check_structure(title, keras, model, shapes, 1 + len(tasks))
    check_training(title, keras, model, tasks, from_logits)
    compiled = CompiledModel(model, keras, backend, shapes, from_logits)
    values, frozen = _copy_values(compiled)
    probe = ModelProbe(compiled, values, frozen)
    names = [f"the output of the task {task!r}" for task in tasks]
    names = ["the output of the target", *names] if tasks else ["the output"]
    _run_keras_code(title, probe.check_outputs, title, names)
    compiled.layer_losses = _run_keras_code(title, probe.find_layer_losses, title)
    return KerasRanker(compiled, values, frozen, reference)


@lru_cache(maxsize=_MAX_CACHED)
def _compile_architecture(
    title: str,
    backend_name: str,
    architecture: str,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    n_outputs: int,
    from_logits: bool,
) -> CompiledModel:
    """Make the functions of a model from its configuration."""
    keras, backend = load_keras(backend_name, torch.get_num_threads())
    keras.backend.clear_session()
    hint = (
        f"{title}: the stored model cannot be made; layers of your own are in a file beside the run's scenario, with "
        "@keras.saving.register_keras_serializable() and get_config"
    )
    model = _run_keras_code(
        hint, keras.saving.deserialize_keras_object, json.loads(architecture), safe_mode=True
    )
    check_structure(title, keras, model, dict(shapes), n_outputs)
    return CompiledModel(model, keras, backend, dict(shapes), from_logits)


def _copy_values(compiled: CompiledModel) -> tuple[list[Tensor], list[Tensor]]:
    """Return copies of the values of a model's weights, and of its frozen variables."""
    weights, frozen = (
        [torch.from_numpy(compiled.keras.ops.convert_to_numpy(variable).copy()) for variable in variables]
        for variables in (compiled.variables, compiled.frozen)
    )
    return weights, frozen


def describe_inputs(
    features: Mapping[str, int], sequences: Sequence[str], length: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input without the rows, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, width in features.items():
        if name in sequences:
            shapes |= {name: (length, width), f"{name}{MASK}": (length,)}
        else:
            shapes[name] = (width,)
    return shapes


def _run_keras_code(title: str, function: Any, *arguments: Any, **options: Any) -> Any:
    """Call the user's code or Keras's, and turn its errors into a ConfigError of one line."""
    try:
        return function(*arguments, **options)
    except NonetError:
        raise
    except Exception as error:
        # Keras puts what it was about to do, at length, before an error inside.
        reason = " ".join(str(error).rpartition("Exception encountered:")[2].split())[:300]
        raise ConfigError(f"{title}: {type(error).__name__}: {reason}") from error
