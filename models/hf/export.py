"""Export of an HF run as a folder that transformers loads: merged weights, codes as tokens, and the remaining weights.

`AutoModelForCausalLM.from_pretrained(folder)` gives the backbone with START and the codes as rows after the words, in input and
output embeddings; `nonet.json` has the numbers of these rows. The weights for event features besides codes (sparse rows, ratings,
gaps) have no place in a language model: they are in `nonet.safetensors`, which a plain transformers model ignores.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from nonet.errors import ConfigError, DataError
from nonet.models import build_model
from nonet.models.hf import lora
from nonet.models.hf.config import SIDS, format_error, get_text_config
from nonet.models.hf.language_model import build_causal_lm
from nonet.models.hf.model import HfRecommender
from nonet.models.hf.text import (
    START_TOKEN,
    find_tokenizer_folder,
    format_sid_token,
    has_tokenizer,
    read_tokenizer,
)

_OTHER_WEIGHTS = "nonet.safetensors"  # File of the weights that a language model has no place for.
_VOCABULARY_WEIGHTS = (
    "token",
    "start",
    "out",
)  # Weights of a recommender that are rows of an exported vocabulary.
_KEPT_OPTIONS = ("precision", "attention", "prompt")  # Options with which an exported folder is opened.


@torch.no_grad()
def build_language_model(
    model: HfRecommender, options: Mapping[str, Any], seed: int, start_row: int | None = None
) -> Any:
    """Create a transformers model with the weights of a recommender, LoRA merged, and rows for START and the codes.

    Args:
        model: The recommender.
        options: The options that it was built from.
        seed: The seed that it was built from.
        start_row: Row of START in the vocabulary, followed by the codes of all levels; None for the first row after the words.
    """
    exported = build_causal_lm(dict(options) | {"attention": None}, seed)
    merged = copy.deepcopy(model.backbone.model)
    lora.merge(merged)
    merged_state = merged.state_dict()
    missing, _ = exported.load_state_dict(merged_state, strict=False)
    buffers = {name: value for name, value in merged.named_buffers() if name in missing}
    exported.load_state_dict(buffers, strict=False)  # Frozen weights are buffers in the recommender.
    start_row = model.backbone.words if start_row is None else start_row
    n_tokens = 1 + len(model.token.weight)
    tied, codes_tied = model.backbone.tied, model.out is None
    exported.resize_token_embeddings(max(model.backbone.words, start_row + n_tokens), mean_resizing=False)
    if tied and not codes_tied:
        get_text_config(exported.config).tie_word_embeddings = exported.config.tie_word_embeddings = False
        exported.get_output_embeddings().weight = nn.Parameter(exported.get_input_embeddings().weight.clone())
    inputs, outputs = exported.get_input_embeddings(), exported.get_output_embeddings()
    code_rows = slice(start_row + 1, start_row + n_tokens)
    inputs.weight[start_row] = (model.start / model.backbone.scale).to(inputs.weight.dtype)
    inputs.weight[code_rows] = model.token.weight.to(inputs.weight.dtype)
    if not tied or not codes_tied:
        code_layer = model.token if model.out is None else model.out
        outputs.weight[start_row] = 0
        outputs.weight[code_rows] = code_layer.weight.to(outputs.weight.dtype)  # type: ignore[operator]
        code_bias = None if model.out is None else model.out.bias
        if getattr(outputs, "bias", None) is not None and code_bias is not None:
            outputs.bias[code_rows] = code_bias.to(outputs.bias.dtype)
    exported.generation_config = type(exported.generation_config)()  # without the backbone's settings
    return exported


def write_folder(model: HfRecommender, options: Mapping[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Write config, safetensors, tokenizer (if the backbone has one) and `nonet.json`, and return the contents of `nonet.json`.

    Args:
        model: The recommender.
        options: The options that it was built from.
        seed: The seed that it was built from.
        folder: The target folder.
    """
    tokenizer = (
        read_tokenizer(options, "an export") if has_tokenizer(find_tokenizer_folder(options)) else None
    )
    start_row = model.backbone.words
    if tokenizer is not None:
        names = [
            START_TOKEN,
            *(
                format_sid_token(level, code)
                for level, size in enumerate(model.codes)
                for code in range(size)
            ),
        ]
        n_words, largest_id = len(tokenizer), max(tokenizer.get_vocab().values(), default=-1)
        if tokenizer.add_tokens(names) != len(names):
            raise ConfigError(
                f"the tokenizer of {n_words} words already has some of the {len(names)} tokens for codes; use one without them"
            )
        ids = tokenizer.convert_tokens_to_ids(names)
        start_row = ids[0]
        if start_row <= largest_id or ids != list(range(start_row, start_row + len(names))):
            raise ConfigError(
                f"the tokenizer of {n_words} words has ids up to {largest_id}, with gaps, so that tokens for codes would get "
                "ids of words; use one whose ids have no gaps"
            )
        tokenizer.save_pretrained(folder)
    build_language_model(model, options, seed, start_row).save_pretrained(folder)
    # A backbone of reduced precision rounds the rows of its vocabulary, so the exact ones are stored too.
    in_vocabulary = _VOCABULARY_WEIGHTS if model.backbone.dtype == model.token.weight.dtype else ()
    other_weights = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if not name.startswith("backbone.") and name.partition(".")[0] not in in_vocabulary
    }
    save_file(other_weights, folder / _OTHER_WEIGHTS)
    layout = {"head": list(model.layout.head), "lead": list(model.layout.lead)}
    contents = {
        "codes": list(model.codes),
        "start": start_row,
        "first": start_row + 1,
        **layout,
        "prompt": options.get("prompt"),
        "options": {name: options.get(name) for name in _KEPT_OPTIONS} | {"tied": model.out is None},
    }
    (folder / SIDS).write_text(json.dumps(contents, indent=1), encoding="utf-8")
    return contents


def load_folder(
    config: Mapping[str, Any], codes: Sequence[int], features: Mapping[str, int], seed: int, folder: Path
) -> HfRecommender:
    """Build the recommender that `write_folder` wrote, with all of its weights; LoRA is merged.

    Args:
        config: Configuration as for `build_model`, without the options of the model.
        codes: Number of codes of every level.
        features: Width of the rows by sparse feature.
        seed: Seed of the run.
        folder: The folder.

    Raises:
        DataError: The folder is incomplete.
    """
    try:
        contents = json.loads((folder / SIDS).read_text(encoding="utf-8"))
        other_weights = load_file(folder / _OTHER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{folder} is incomplete: {format_error(error)}; export the run again") from None
    kept = (*_KEPT_OPTIONS, "tied")  # a foreign folder chooses no other options
    options = {name: value for name, value in contents["options"].items() if name in kept}
    model = build_model(dict(config) | options | {"path": str(folder)}, codes, features, seed)
    absent, unknown = model.load_state_dict(other_weights, strict=False)
    absent = [name for name in absent if name.partition(".")[0] not in ("backbone", *_VOCABULARY_WEIGHTS)]
    if absent or unknown:
        names = ", ".join([*absent, *unknown][:3])
        raise DataError(f"{folder}: {_OTHER_WEIGHTS} does not fit this model ({names}); export the run again")
    return model


def load_exported_rows(model: HfRecommender, folder: Path) -> None:
    """Copy the rows of START and the codes from the vocabulary of an exported folder into the recommender.

    The backbone of `model` was loaded from this folder.

    Raises:
        ConfigError: The folder has other codes.
    """
    contents = json.loads((folder / SIDS).read_text(encoding="utf-8"))
    if list(contents["codes"]) != list(model.codes):
        raise ConfigError(
            f"model.path: {folder} was exported with codes {contents['codes']} by level, this run has {list(model.codes)}, so "
            "the vocabularies differ. Use the semantic ids of that run (tokenizer: {use: file}), or the original backbone"
        )
    first_row, n_codes = int(contents["first"]), len(model.token.weight)
    with torch.no_grad():
        input_rows = model.backbone.model.get_input_embeddings().weight
        model.start.copy_(input_rows[first_row - 1] * model.backbone.scale)
        model.token.weight.copy_(input_rows[first_row : first_row + n_codes])
        if model.out is not None:
            output_layer = model.backbone.output_layer
            output_rows = input_rows if output_layer is None else output_layer.weight
            model.out.weight.copy_(output_rows[first_row : first_row + n_codes])  # type: ignore[index]
            if model.out.bias is not None and output_layer is not None:
                model.out.bias.copy_(output_layer.bias[first_row : first_row + n_codes])  # type: ignore[index]
