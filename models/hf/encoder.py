"""Text encoders for item vectors: the last hidden states of a transformers model, pooled to one vector per text.

`tokenizer: {vectors: [{use: hf, path: models/bge-small, columns: [title, categories]}, cooccurrence]}`. Texts of similar length
share a batch of at most 64, so a text's vector depends only on its words, up to rounding by the padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.models.hf.config import read_folder_keys
from nonet.models.hf.text import read_tokenizer

# Shapes: I texts, b of them at once, S words of the longest, D width.
_AT_ONCE, _WORDS = 64, 256


def check_encoder(options: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if there is no model or no tokenizer to load."""
    path = str(folder / options["path"])
    _convert_errors(lambda: read_folder_keys(path))
    _convert_errors(lambda: read_tokenizer({"path": path}, "a text encoder"))


@torch.no_grad()
def encode(options: Mapping[str, Any], texts: Sequence[str], folder: Path) -> np.ndarray:
    """Encode texts as vectors [I, D] float32.

    Args:
        options: path (relative to the scenario), and pool: "mean" of a text's states, its "last" or its "first".
        texts: The texts.
        folder: Folder of the scenario.

    Raises:
        ConfigError: The model or its tokenizer cannot be loaded.
    """
    check_encoder(options, folder)
    path = str(folder / options["path"])
    from transformers import AutoModel

    tokenizer = read_tokenizer({"path": path}, "a text encoder")
    try:
        model: Any = AutoModel.from_pretrained(path, local_files_only=True, dtype=torch.float32).eval()
    except Exception as error:  # Each model class raises its own exceptions.
        line = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"tokenizer.vectors: {path} cannot be read: {type(error).__name__}: {line}"
        ) from error
    words = [tokenizer(text or " ", truncation=True, max_length=_WORDS).input_ids or [0] for text in texts]
    order = sorted(range(len(words)), key=lambda at: len(words[at]))
    out = np.empty((len(words), int(model.config.get_text_config().hidden_size)), np.float32)
    for start in range(0, len(order), _AT_ONCE):
        some = order[start : start + _AT_ONCE]
        out[some] = _pool_states(model, [words[at] for at in some], str(options.get("pool", "mean"))).numpy()
    return out


def _pool_states(model: Any, words: Sequence[Sequence[int]], pool: str) -> Tensor:
    """Encode texts and pool their last hidden states to one vector per text [b, D]."""
    most = max(map(len, words))
    ids_bS = torch.zeros(len(words), most, dtype=torch.int64)
    for at, each in enumerate(words):
        ids_bS[at, : len(each)] = torch.tensor(each)
    lengths_b = torch.tensor([len(each) for each in words])
    there_bS = torch.arange(most) < lengths_b[:, None]
    state_bSD = model(input_ids=ids_bS, attention_mask=there_bS.long()).last_hidden_state.float()
    if pool == "first":
        return state_bSD[:, 0]
    if pool == "last":
        return state_bSD[torch.arange(len(words)), lengths_b - 1]
    return (state_bSD * there_bS[..., None]).sum(1) / lengths_b[:, None]


def _convert_errors(check: Any) -> None:
    """Run a check of `model.path`, and let its errors name `tokenizer.vectors` instead."""
    try:
        check()
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path:", "tokenizer.vectors:")) from None
