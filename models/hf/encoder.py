"""Text encoders for item vectors: the last hidden states of a transformers model, pooled to one vector per text.

`tokenizer: {vectors: [{use: hf, path: models/bge-small, columns: [title, categories]}, cooccurrence]}`. Texts of similar length
share a batch, and padding is masked, so a text's vector depends only on the text, up to rounding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.errors import ConfigError
from nonet.models.hf.config import read_folder_keys
from nonet.models.hf.text import check_words, read_tokenizer

# Shapes: I texts, b texts of a batch, S tokens of the longest text in it, D width.
_BATCH_SIZE = 64  # Texts per batch.
_MAX_TOKENS = 256  # Tokens per text, or fewer if the model reads fewer; longer texts are cut.


def check_encoder(options: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if the folder of the options has no model or no tokenizer."""
    path = str(folder / options["path"])
    _convert_errors(lambda: read_folder_keys(path))
    _convert_errors(lambda: read_tokenizer({"path": path}, "a text encoder"))


@torch.no_grad()
def encode(options: Mapping[str, Any], texts: Sequence[str], folder: Path) -> np.ndarray:
    """Encode texts as vectors [I, D] float32.

    Args:
        options: "path" of the model, relative to the scenario, and "pool": whether a vector is the "mean" of a text's states or
            its "last" or "first" state.
        texts: The texts.
        folder: Folder of the scenario.

    Raises:
        ConfigError: The model or its tokenizer cannot be loaded, they do not fit each other, or the model cannot read the texts.
    """
    check_encoder(options, folder)
    path = str(folder / options["path"])
    from transformers import AutoModel

    tokenizer = read_tokenizer({"path": path}, "a text encoder")
    try:
        model: Any = AutoModel.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, dtype=torch.float32
        ).eval()
    except Exception as error:  # Each model class raises its own exceptions.
        message = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"tokenizer.vectors: {path} cannot be read: {type(error).__name__}: {message}"
        ) from error
    text_config = model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or _MAX_TOKENS
    max_length = min(_MAX_TOKENS, tokenizer.model_max_length, positions)
    token_ids = [
        tokenizer(text or " ", truncation=True, max_length=max_length).input_ids or [0] for text in texts
    ]
    n_words = len(model.get_input_embeddings().weight)
    _convert_errors(lambda: check_words(tokenizer, n_words, [max(ids) for ids in token_ids]))
    rows_by_length = sorted(range(len(token_ids)), key=lambda row: len(token_ids[row]))
    vectors = np.empty((len(token_ids), int(text_config.hidden_size)), np.float32)
    for start in range(0, len(rows_by_length), _BATCH_SIZE):
        rows = rows_by_length[start : start + _BATCH_SIZE]
        batch = [token_ids[row] for row in rows]
        try:
            vectors[rows] = _pool_states(model, batch, str(options.get("pool", "mean"))).numpy()
        except (IndexError, RuntimeError, TypeError, ValueError) as error:  # of the model's own code
            raise ConfigError(
                f"tokenizer.vectors: {path} cannot read texts of {len(batch[-1])} tokens: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}; if it reads fewer, set model_max_length in its tokenizer_config.json, "
                "else use another model"
            ) from error
    return vectors


def _pool_states(model: Any, token_ids: Sequence[Sequence[int]], pool: str) -> Tensor:
    """Encode texts and pool their last hidden states to one vector per text [b, D]."""
    max_length = max(map(len, token_ids))
    ids_bS = torch.zeros(len(token_ids), max_length, dtype=torch.int64)
    for row, ids in enumerate(token_ids):
        ids_bS[row, : len(ids)] = torch.tensor(ids)
    lengths_b = torch.tensor([len(ids) for ids in token_ids])
    mask_bS = torch.arange(max_length) < lengths_b[:, None]
    state_bSD = model(input_ids=ids_bS, attention_mask=mask_bS.long()).last_hidden_state.float()
    if pool == "first":
        return state_bSD[:, 0]
    if pool == "last":
        return state_bSD[torch.arange(len(token_ids)), lengths_b - 1]
    return (state_bSD * mask_bS[..., None]).sum(1) / lengths_b[:, None]


def _convert_errors(check: Any) -> None:
    """Run a check that reports errors of `model` or `model.path`, and report them as errors of `tokenizer.vectors`."""
    try:
        check()
    except ConfigError as error:
        raise ConfigError(re.sub(r"^model(\.path)?:", "tokenizer.vectors:", str(error))) from None
