"""Build a ranker from the user's function, or from the configuration that a checkpoint has."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.errors import ConfigError, NonetError
from nonet.models.keras.backends import load_keras
from nonet.models.keras.compiled import MASK, CompiledModel, remove_metrics
from nonet.models.keras.probes import ModelProbe
from nonet.models.keras.ranker import KerasRanker
from nonet.models.keras.structure import check_structure, check_training
from nonet.plugins import HERE, PluginFiles, import_file, load_reference, parse_file
from nonet.run_code import SOURCES

ARCHITECTURE = "architecture"
"""The option of `build` that has the configuration of a trained model as JSON."""
_SOURCES_LIST = "sources.json"  # The folder that has this file is that of a run.
_MAX_CACHED = 8  # Configurations whose compiled functions are kept.


def build(
    options: Mapping[str, Any], codes: Sequence[int], features: Mapping[str, int], seed: int
) -> KerasRanker:
    """Build a ranker with initial weights (`ModelSpec.build`); a click model has no codes.

    With `architecture`, the model is made from it and the user's function is not called; Keras refuses configurations that
    contain code. If the user's file is in the folder `sources` of the run, it is imported for the layers that it registers.

    Args:
        options: Options of the model (`KerasOptions`), `length` of sequences, and perhaps `tasks`, `architecture` and
            `sources`.
        codes: Not used.
        features: Width of the rows of each feature.
        seed: Seed of the weights.

    Raises:
        ConfigError: The function cannot be called, or returns something else than a Keras model of these inputs with one logit,
            or with one for the target and each task. Or a checkpoint does not say which of several files has the layers.
    """
    tasks, from_logits = tuple(options.get("tasks", ())), options.get("from_logits", True)
    shapes = describe_inputs(features, options["sequences"], options["length"])
    title = f"model.path: {Path(options['path']).name}"
    # Before any code of the user imports Keras.
    keras, backend = load_keras(options["backend"], torch.get_num_threads())
    if architecture := options.get(ARCHITECTURE):
        file = _find_file(title, Path(options["sources"]), options["path"]) if options["sources"] else None
        module = "" if file is None else import_file(file, title).__name__
        described = tuple(shapes.items()), 1 + len(tasks), from_logits
        compiled = _compile_architecture(title, options["backend"], architecture, module, *described)
        return KerasRanker(compiled, *_copy_values(compiled), _name_in_run(options["path"]))
    keras.utils.set_random_seed(seed % (1 << 31))
    # Names of layers, and so of weights, do not depend on what was built before. A collection of all garbage takes half a second.
    keras.backend.clear_session(free_memory=False)
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
    return KerasRanker(compiled, values, frozen, _name_in_run(options["path"]))


def _name_in_run(reference: str) -> str:
    """Return the user's function as `sources/FOLDER/file.py:NAME`, relative to its run; without a run, as `file.py:NAME`."""
    path = Path(reference)
    if not path.is_absolute():
        return reference
    runs = [parent.parent for parent in path.parents if parent.name == SOURCES]
    run = next((run for run in runs if (run / _SOURCES_LIST).is_file()), path.parent)
    return str(path.relative_to(run))


def _find_file(title: str, sources: Path, reference: str) -> Path | None:
    """Return the copy of the user's file in the folder `sources` of a run; None if it has none.

    Raises:
        ConfigError: The reference is that of an older checkpoint, without a folder, and several files have its name.
    """
    file = Path(str(parse_file(reference)))
    if file.parts[0] == SOURCES:
        found = [PluginFiles(str(sources), is_closed=True).resolve_path(str(file.relative_to(SOURCES)))]
    else:
        found = sorted(sources.rglob(file.name))
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(sources)) for path in found)
        raise ConfigError(
            f"{title}: the checkpoint does not say which of {len(found)} files in {sources} has its layers: {names}. Remove all "
            "but the one that the scenario names, or train again"
        )
    return found[0] if found and found[0].is_file() else None


@lru_cache(maxsize=_MAX_CACHED)
def _compile_architecture(
    title: str,
    backend_name: str,
    architecture: str,
    module: str,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    n_outputs: int,
    from_logits: bool,
) -> CompiledModel:
    """Make the functions of a model from its configuration.

    The layers of the user are those of the imported module of this name, which stands for the path and content of a file, even
    if other files have registered layers of their names since; "" for none.
    """
    keras, backend = load_keras(backend_name, torch.get_num_threads())
    keras.backend.clear_session(free_memory=False)
    hint = (
        f"{title}: the stored model cannot be made; layers of your own are in a file beside the run's scenario, with "
        "@keras.saving.register_keras_serializable() and get_config"
    )
    # Again, as their import did: a scope of custom objects would not reach models inside models.
    keras.saving.get_custom_objects().update(_list_registered(keras, module))
    model = _run_keras_code(
        hint, keras.saving.deserialize_keras_object, remove_metrics(architecture), safe_mode=True
    )
    check_structure(title, keras, model, dict(shapes), n_outputs)
    return CompiledModel(model, keras, backend, dict(shapes), from_logits)


def _list_registered(keras: Any, module: str) -> dict[str, Any]:
    """Return what was registered for configurations in a module and in those beside it that it names, by registered name."""
    modules = [sys.modules[module]] if module else []
    found: dict[str, Any] = {}
    for each in modules:  # grows
        for value in vars(each).values():
            if inspect.isclass(value) or inspect.isfunction(value):
                found.setdefault(keras.saving.get_registered_name(value), value)
            elif inspect.ismodule(value) and value not in modules:
                folder = Path(str(modules[0].__file__)).resolve().parent
                if (file := getattr(value, "__file__", None)) and Path(file).resolve().is_relative_to(folder):
                    modules.append(value)
    return {name: value for name, value in found.items() if ">" in name}


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
