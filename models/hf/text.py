"""Text around semantic ids: the backbone's tokenizer, and the words of a prompt around a history.

A prompt is a template with `{history}` in it. The text before it is read once, before the user's START; the text after it is
read again before the codes of every item (`layout.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nonet.errors import ConfigError
from nonet.models.hf.config import HISTORY, check_installed, fetch_folders
from nonet.models.hf.layout import PromptLayout
from nonet.suggest import join_names

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
START_TOKEN = "<|sid_user|>"


def format_sid_token(level: int, code: int) -> str:
    """Return the token of a code in an exported vocabulary."""
    return f"<|sid_{level + 1}_{code}|>"


def find_tokenizer_folder(options: Mapping[str, Any]) -> str | None:
    """Return the folder of the tokenizer: its own, or else that of the model; None if neither is given."""
    local = fetch_folders(options)
    return local.get("tokenizer") or local.get("path")


def has_tokenizer(folder: str | None) -> bool:
    """Return whether a folder holds a tokenizer."""
    return folder is not None and any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES)


def read_tokenizer(options: Mapping[str, Any], why: str) -> Any:
    """Load the tokenizer of a model.

    Args:
        options: Options of the model.
        why: Option or stage that needs the tokenizer, with which an error message begins.

    Raises:
        ConfigError: There is no tokenizer.
    """
    check_installed()
    folder = find_tokenizer_folder(options)
    if not has_tokenizer(folder):
        problem = (
            "no folder is given"
            if folder is None
            else f"{folder} holds none of {join_names(_TOKENIZER_FILES)}"
        )
        raise ConfigError(
            f"{why} needs a tokenizer, but {problem}; set model.tokenizer to a folder that has one"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Each kind of tokenizer raises its own exceptions.
        message = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model: the tokenizer of {folder} cannot be read: {type(error).__name__}: {message}"
        ) from error


def encode_text(tokenizer: Any, text: str, *, starts_sequence: bool = False) -> tuple[int, ...]:
    """Tokenize a text; with `starts_sequence`, keep the special tokens that the tokenizer adds at the beginning of a sequence."""
    if not starts_sequence:
        return tuple(tokenizer(text, add_special_tokens=False).input_ids) if text else ()
    ids = list(tokenizer(text).input_ids)
    # An end-of-sequence token would separate the text from the history after it.
    while ids and ids[-1] == tokenizer.eos_token_id and ids[-1] != tokenizer.bos_token_id:
        ids.pop()
    return tuple(ids)


def make_layout(options: Mapping[str, Any], levels: int, words: int | None = None) -> PromptLayout:
    """Return the layout of the prompt.

    Args:
        options: Options of the model.
        levels: Number of codes per item.
        words: Number of word embeddings of the backbone; None to skip the check that they suffice.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or has more words than the backbone.
    """
    prompt = options.get("prompt")
    if not prompt:
        return PromptLayout(levels)
    tokenizer = read_tokenizer(options, "model.prompt")
    before, _, after = str(prompt).partition(HISTORY)
    layout = PromptLayout(
        levels, encode_text(tokenizer, before, starts_sequence=True), encode_text(tokenizer, after)
    )
    check_words(tokenizer, words, [*layout.head, *layout.lead])
    return layout


def check_words(tokenizer: Any, words: int | None, ids: Sequence[int]) -> None:
    """Raise ConfigError if one of the token ids is not below `words`, the number of word embeddings of the backbone."""
    if words is not None and max(ids, default=0) >= words:
        raise ConfigError(
            f"model: the tokenizer has {len(tokenizer):,} words, but the backbone has rows for only {words:,}: "
            f"word {max(ids)} has none; use the tokenizer of this backbone"
        )


def check_names(tokenizer: Any, folder: str) -> None:
    """Raise ConfigError if a tokenizer already has tokens with the names of codes."""
    duplicate_tokens = [
        word for word in (START_TOKEN, format_sid_token(level=0, code=0)) if word in tokenizer.get_vocab()
    ]
    if duplicate_tokens:
        raise ConfigError(
            f"model: the tokenizer of {folder} with {len(tokenizer):,} words already contains {duplicate_tokens[0]}, "
            "the name of a code; use the complete exported folder (with nonet.json), or the original backbone"
        )
