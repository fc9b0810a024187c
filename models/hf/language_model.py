"""Complete transformers language models, loaded from a folder or initialised from a config.

A model that ranks divide is built on the meta device (`workers/devices/deferred.py` records the build), and its weights are
drawn or read later, one at a time: no rank has all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.attention import register
from nonet.errors import ConfigError
from nonet.models.hf.config import fetch_folders, read_config
from nonet.stored_tensors import StoredTensors

# attn_implementation of transformers, by the option `attention`.
ATTENTIONS = {"uni": "uni_attention", "sdpa": "sdpa", "eager": "eager"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WEIGHTS = "model.safetensors"


def build_causal_lm(options: Mapping[str, Any], seed: int, config: Any = None) -> Any:
    """Create the complete language model, with weights from `path`, or drawn from `seed` for a `config`.

    All random draws during construction use the seed, so two processes that load one folder have bitwise equal models.

    Args:
        options: Options of the model.
        seed: Seed of the run.
        config: A transformers config, for which the weights are drawn; by default that of the options.

    Raises:
        ConfigError: transformers cannot build it, or weights of the folder are missing, unexpected or of another shape.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path, attention = None if config else fetch_folders(options).get("path"), options.get("attention")
    config = config or read_config(options)
    if attention == "uni":
        register()
    load_options: dict[str, Any] = {
        "dtype": DTYPES[str(options.get("precision", "fp32"))],
        "trust_remote_code": False,  # Otherwise transformers asks on a terminal whether to run code of the folder.
    }
    if attention is not None:
        load_options["attn_implementation"] = ATTENTIONS[attention]
    is_deferred = torch.empty(0).device.type == "meta"  # The weights are read or drawn later, one at a time.
    try:
        if path and is_deferred:
            return _build_from_folder(config, str(path), load_options)
        if path:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model_and_report: Any = AutoModelForCausalLM.from_pretrained(
                    path,
                    config=config,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # _check_loaded raises an error that lists all of them.
                    **load_options,
                )
            model, load_report = model_and_report
            _check_loaded(model, load_report, path)
            return model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, **load_options)
    except ConfigError:
        raise
    except KeyError as error:
        if error.args != (ATTENTIONS["uni"],):  # Models with a table of their own look up the name in it.
            raise
        raise ConfigError(
            f"model.attention: uni: {config.model_type} has its own table of attention functions; remove the key attention"
        ) from error
    except Exception as error:  # Each model class raises its own exceptions.
        option = "path" if options.get("path") else "config"
        message = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.{option}: transformers cannot build it: {type(error).__name__}: {message}"
        ) from error


def _check_loaded(model: Any, load_report: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError if a folder's weights do not match its config.

    The output layer may be missing, because semantic ids have their own. Tied weights do not count as missing.
    """
    output_layer = model.get_output_embeddings()
    output_names = {name for name, module in model.named_modules() if module is output_layer}
    missing = [
        name for name in sorted(load_report["missing_keys"]) if name.rpartition(".")[0] not in output_names
    ]
    mismatches = [
        (verb, [str(name[0] if isinstance(name, tuple) else name) for name in names])
        for verb, names in (
            ("lacks", missing),
            ("has, although the config does not,", sorted(load_report["unexpected_keys"])),
            ("has another shape than the config of", sorted(load_report["mismatched_keys"])),
        )
        if names
    ]
    if mismatches:
        problems = "; ".join(
            f"it {verb} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for verb, names in mismatches
        )
        raise ConfigError(
            f"model.path: the weights of {path} do not match its config: {problems}; use a folder that save_pretrained wrote"
        )


def hash_folder(path: str) -> str:
    """Return the SHA-256 of the names and hashes of a folder's config and weight files."""
    digest = hashlib.sha256()
    files = [
        Path(path) / "config.json",
        *sorted(Path(path).glob("*.safetensors")),
        *sorted(Path(path).glob("*.bin")),
    ]
    for file in files:
        with file.open("rb") as source:
            digest.update(f"{file.name} {hashlib.file_digest(source, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _build_from_folder(config: Any, folder: str, options: Mapping[str, Any]) -> Any:
    """Build a language model on the meta device, and let its weights be read from a folder.

    Args:
        config: The transformers config.
        folder: The folder, whose safetensors files have the names of the model's weights.
        options: Arguments of `AutoModelForCausalLM.from_config`.

    Raises:
        ValueError: Names or shapes differ, so that transformers must load the weights.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, **options)
    changed_ns = max(file.stat().st_mtime_ns for file in Path(folder).glob("*.safetensors"))
    stored, state = _open(folder, changed_ns), model.state_dict()
    output_layer = model.get_output_embeddings()
    unused = {f"{name}.weight" for name, module in model.named_modules() if module is output_layer}
    if set(state) - set(stored) - unused or set(stored) - set(state):
        raise ValueError(f"{folder} has weights of other names than {type(model).__name__}")
    for name in stored:
        if stored.get_shape(name) != tuple(state[name].shape):
            raise ValueError(f"{folder}: {name} has another shape than the config says")
        torch.ops.nonet.read_stored(state[name], folder, changed_ns, name)
    return model


@torch.library.custom_op("nonet::read_stored", mutates_args=("target",))
def _read_stored(target: Tensor, folder: str, changed_ns: int, name: str) -> None:
    """Copy a weight of a folder, whose newest file was changed at a time, into a tensor."""
    target.copy_(_open(folder, changed_ns)[name])


@_read_stored.register_fake
def _read_no_values(target: Tensor, folder: str, changed_ns: int, name: str) -> None:
    """Do nothing: a meta tensor has no values."""


@lru_cache(maxsize=1)
def _open(folder: str, changed_ns: int) -> StoredTensors:
    """Open the weights of a folder, again if they have changed."""
    return StoredTensors(Path(folder) / _WEIGHTS)
