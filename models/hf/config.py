"""Reads and checks the transformers config of a Hugging Face backbone; every error is one line.

`path` is a folder that `save_pretrained` wrote (config.json, safetensors, optionally a tokenizer). `config` has the same keys,
and the weights are drawn. A folder at an address is fetched once per node (`nonet.addresses`); nothing else is downloaded.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nonet.addresses import fetch_folder
from nonet.errors import ConfigError
from nonet.suggest import join_names, suggest_sentence

FEW_WORDS = 16
"""Default vocabulary size of a backbone from `model.config`: small, since its rows are not used without a tokenizer."""
HISTORY = "{history}"
"""Placeholder of the history in a prompt."""
SIDS = "nonet.json"
"""File that `nonet export` writes into a folder: the codes per level, and the first of their rows in the vocabulary."""
# Set to None with the small default vocabulary, because the defaults of a model type can exceed it.
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_installed() -> None:
    """Raise ConfigError if transformers is not installed."""
    if find_spec("transformers") is None:
        raise ConfigError("model.use: hf needs transformers 5: pip install 'nonet[hf]'")


def fetch_folders(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the folders of `path` and `tokenizer` on this machine; those at an address are fetched."""
    return {
        key: fetch_folder(str(value), f"model.{key}") if value and key in ("path", "tokenizer") else value
        for key, value in options.items()
    }


def read_config(options: Mapping[str, Any]) -> Any:
    """Return the transformers config of `path` or `config`.

    Raises:
        ConfigError: The config cannot be read, or has unknown keys.
    """
    check_installed()
    if options.get("path"):
        return _load_folder_config(fetch_folders(options)["path"])
    return _make_config(dict(options["config"]))


def shrink_config(config: Any) -> Any:
    """Return a config of the same architecture with few words and a layer of each kind."""
    config = copy.deepcopy(config)
    text_config = get_text_config(config)
    kinds = list(dict.fromkeys(getattr(text_config, "layer_types", None) or ()))
    if kinds:
        text_config.layer_types = kinds
    text_config.num_hidden_layers = len(kinds) or min(2, text_config.num_hidden_layers)
    text_config.vocab_size = FEW_WORDS
    for name in _SPECIAL:
        setattr(text_config, name, None)
    return config


def get_text_config(config: Any) -> Any:
    """Return the config of the text decoder, which is one of several in multimodal models."""
    return config.get_text_config(decoder=True)


def check_heads(config: Any) -> None:
    """Check that the query heads are a multiple of the key-value heads."""
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % kv_heads:
        raise ConfigError(
            f"model: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )


def check_window(config: Any, history: int, layout: Any) -> None:
    """Check that the longest history fits the model's positions and attention window."""
    needed_positions = int(layout.count_positions(history + 1))
    for name, applies in (
        ("max_position_embeddings", True),
        ("sliding_window", getattr(config, "use_sliding_window", True)),
    ):
        max_positions = getattr(config, name, None)
        if applies and max_positions and max_positions < needed_positions:
            events_that_fit = int(max_positions - layout.count_positions(events=0)) // layout.stride - 1
            raise ConfigError(
                f"model: its {name} is {max_positions}, and data.history: {history} makes sequences of {needed_positions} "
                f"positions ({layout.stride} an event); lower data.history to {max(1, events_that_fit)} or fewer"
            )


_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""The files that peft writes for an adapter, also beside the weights of its base model."""


def read_folder_keys(path: str) -> dict[str, Any]:
    """Read the config.json of a model folder.

    Raises:
        ConfigError: The folder or the file does not exist or is not valid, or the folder has an adapter, which is not read.
    """
    file = Path(path) / "config.json"
    if adapters := [name for name in _ADAPTER_FILES if Path(path, name).is_file()]:
        raise ConfigError(
            f"model.path: {path} has a LoRA adapter ({join_names(adapters)}), which is not read; merge it into its base model "
            f"first, and use that folder: peft.AutoPeftModelForCausalLM.from_pretrained({path!r}).merge_and_unload()"
            ".save_pretrained(MERGED)"
        )
    if not file.is_file():
        problem = (
            join_names(sorted(entry.name for entry in Path(path).iterdir()))
            if Path(path).is_dir()
            else "no such folder"
        )
        raise ConfigError(
            f"model.path: {path} has no config.json ({problem}); use a folder that save_pretrained wrote"
        )
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not JSON: {error}") from None
    if not isinstance(keys, dict) or not isinstance(keys.get("model_type"), str):
        raise ConfigError(f"model.path: {file} has no model_type; use a folder that save_pretrained wrote")
    return keys


def _load_folder_config(path: str) -> Any:
    """Load the transformers config of a model folder."""
    keys = read_folder_keys(path)
    _check_model_type(keys["model_type"], "model.path")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"model.path: the config of {path} cannot be read: {format_error(error)}") from None


def _make_config(keys: dict[str, Any]) -> Any:
    """Create a transformers config from the keys of `model.config`."""
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ConfigError(
            "model.config: the key model_type is missing; give it, e.g. {model_type: qwen3, hidden_size: 64, ...}"
        )
    _check_model_type(model_type, "model.config.model_type")
    from transformers import AutoConfig

    default_config = AutoConfig.for_model(model_type)
    known_keys = {
        *default_config.to_dict(),
        *getattr(default_config, "attribute_map", {}),
        "attn_implementation",
    }
    for key in keys:
        if key not in known_keys:
            raise ConfigError(
                f"model.config.{key}: {model_type} has no such key.{suggest_sentence(key, known_keys)}"
            )
    if "vocab_size" not in keys:
        keys = {"vocab_size": FEW_WORDS, **dict.fromkeys(_SPECIAL), **keys}
    try:
        return AutoConfig.for_model(model_type, **keys)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"model.config: {model_type} does not take these keys: {format_error(error)}"
        ) from None
    except Exception as error:  # Strict configs raise their own class, which is not a ValueError.
        raise ConfigError(
            f"model.config: {model_type} does not take these keys: {format_error(error)}"
        ) from error


def _check_model_type(model_type: str, option: str) -> None:
    """Raise ConfigError, which names `option`, if transformers has no causal language model of this type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if model_type not in CONFIG_MAPPING_NAMES:
        raise ConfigError(
            f"{option}: transformers knows no model_type {model_type!r}.{suggest_sentence(model_type, CAUSAL)}"
        )
    if model_type not in CAUSAL:
        raise ConfigError(
            f"{option}: {model_type} is not a causal language model.{suggest_sentence(model_type, CAUSAL)}"
        )


def format_error(error: BaseException) -> str:
    """Return the message of an error in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
