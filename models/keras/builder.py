"""Build a ranker from the user's function, or from the configuration that a checkpoint has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from nonet.errors import ConfigError
from nonet.models.keras.backends import load_keras
from nonet.models.keras.compiled import MASK, CompiledModel
from nonet.models.keras.ranker import KerasRanker
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
    n_logits = 1 + len(options.get("tasks", ()))
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
            title, options["backend"], architecture, tuple(shapes.items()), n_logits
        )
        return KerasRanker(
            compiled, [torch.zeros(tuple(variable.shape)) for variable in compiled.variables], reference
        )
    keras.utils.set_random_seed(seed % (1 << 31))
    keras.backend.clear_session()  # Names of layers, and so of weights, do not depend on what was built before.
    model = _run_keras_code(title, load_reference(options["path"], HERE, title), dict(shapes))
    compiled = CompiledModel(_check_model(title, keras, model, shapes, n_logits), keras, backend, shapes)
    values = [
        torch.from_numpy(keras.ops.convert_to_numpy(variable)).clone() for variable in compiled.variables
    ]
    return KerasRanker(compiled, values, reference)


@lru_cache(maxsize=_MAX_CACHED)
def _compile_architecture(
    title: str,
    backend_name: str,
    architecture: str,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    n_logits: int,
) -> CompiledModel:
    """Make the functions of a model from its configuration."""
    keras, backend = load_keras(backend_name, torch.get_num_threads())
    keras.backend.clear_session()
    hint = f"{title}: the stored model cannot be made; layers of your own are in a file beside the run's scenario"
    model = _run_keras_code(
        hint, keras.saving.deserialize_keras_object, json.loads(architecture), safe_mode=True
    )
    return CompiledModel(
        _check_model(title, keras, model, dict(shapes), n_logits), keras, backend, dict(shapes)
    )


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
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{title}: {type(error).__name__}: {reason}") from error


def _check_model(
    title: str, keras: Any, model: Any, shapes: Mapping[str, tuple[int, ...]], n_logits: int
) -> Any:
    """Return the model if it has inputs of these shapes by name and so many logits, and changes nothing but by gradients.

    Raises:
        ConfigError: It is not so.
    """
    if not isinstance(model, keras.Model):
        raise ConfigError(f"{title}: wanted a keras.Model, got {type(model).__name__}")
    inputs = getattr(model, "input", None)
    if not isinstance(inputs, dict):
        raise ConfigError(
            f"{title}: the inputs of the model are not a dictionary by feature; write keras.Model({{name: input, ...}}, logit)"
        )
    for name, tensor in inputs.items():
        if name not in shapes:
            raise ConfigError(
                f"{title}: the model has an input {name!r}, which is no feature; features: {', '.join(shapes)}"
            )
        if tuple(tensor.shape[1:]) != shapes[name]:
            raise ConfigError(
                f"{title}: the input {name!r} has the shape {tuple(tensor.shape[1:])}, its rows have {shapes[name]}"
            )
    output = getattr(model, "output", None)
    allowed: list[tuple[int | None, ...]] = [(None, n_logits)]
    wanted = f"a logit of the target and of each task, a tensor of (None, {n_logits})"
    if n_logits == 1:
        allowed.append((None,))
        wanted = "one logit for each row, a tensor of the shape (None,) or (None, 1)"
    if tuple(getattr(output, "shape", ())) not in allowed:
        raise ConfigError(f"{title}: wanted {wanted}, got {getattr(output, 'shape', type(output).__name__)}")
    last = model.layers[-1]
    if getattr(last, "activation", None) is keras.activations.sigmoid:
        raise ConfigError(
            f"{title}: the layer {last.name!r} ends with a sigmoid; return logits, without activation"
        )
    for variable in model.non_trainable_variables:
        if not variable.path.endswith("seed_generator_state"):
            raise ConfigError(
                f"{title}: {variable.path} is not changed by gradients, and would depend on the padding of batches. "
                "Use LayerNormalization in place of BatchNormalization, and no frozen weights"
            )
    return model
