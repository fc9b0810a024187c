"""Language models whose weights are read from a folder later, one at a time, after they were built on the meta device.

A model that ranks divide is built in this way (`workers/devices/deferred.py` records the build): no rank has all weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nonet.stored_tensors import StoredTensors

_WEIGHTS = "model.safetensors"


def build_from_folder(config: Any, folder: str, options: Mapping[str, Any]) -> Any:
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
def _(target: Tensor, folder: str, changed_ns: int, name: str) -> None:
    """Do nothing: a meta tensor has no values."""


@lru_cache(maxsize=1)
def _open(folder: str, changed_ns: int) -> StoredTensors:
    """Open the weights of a folder, again if they have changed."""
    return StoredTensors(Path(folder) / _WEIGHTS)
