"""Export of an HF run as a folder that transformers loads: merged weights, codes as tokens, and the remaining weights.

`AutoModelForCausalLM.from_pretrained(folder)` gives the backbone with START and the codes as rows after the words, in input and
output embeddings; `nonet.json` holds their positions. The weights for event features besides codes (sparse rows, ratings, gaps)
have no place in a language model: they are in `nonet.safetensors`, and a plain transformers model ignores them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nonet.errors import ConfigError
from nonet.models.hf import lora
from nonet.models.hf.backbone import build_causal_lm
from nonet.models.hf.config import SIDS, get_text_config
from nonet.models.hf.model import HfRecommender
from nonet.models.hf.text import (
    START_TOKEN,
    find_tokenizer_folder,
    format_sid_token,
    has_tokenizer,
    read_tokenizer,
)

BESIDE = "nonet.safetensors"


@torch.no_grad()
def build_language_model(
    model: HfRecommender, options: Mapping[str, Any], seed: int, first: int | None = None
) -> Any:
    """Create the complete transformers model of a recommender.

    Args:
        model: The recommender.
        options: The options that it was built from.
        seed: The seed that it was built from.
        first: Row of START in the vocabulary, followed by the codes of all levels; None for the first row after the words.
    """
    whole = build_causal_lm(dict(options) | {"attention": None}, seed)
    learned = copy.deepcopy(model.backbone.model)
    lora.merge(learned)
    own = learned.state_dict()
    missing, _ = whole.load_state_dict(own, strict=False)
    buffers = {name: value for name, value in learned.named_buffers() if name in missing}
    whole.load_state_dict(buffers, strict=False)  # Frozen weights are buffers in the recommender.
    first = model.backbone.words if first is None else first
    tokens = 1 + len(model.token.weight)
    tied, codes_tied = model.backbone.tied, model.out is None
    whole.resize_token_embeddings(max(model.backbone.words, first + tokens), mean_resizing=False)
    if tied and not codes_tied:
        get_text_config(whole.config).tie_word_embeddings = whole.config.tie_word_embeddings = False
        whole.get_output_embeddings().weight = nn.Parameter(whole.get_input_embeddings().weight.clone())
    reads, writes = whole.get_input_embeddings(), whole.get_output_embeddings()
    rows = slice(first + 1, first + tokens)
    reads.weight[first] = (model.start / model.backbone.scale).to(reads.weight.dtype)
    reads.weight[rows] = model.token.weight.to(reads.weight.dtype)
    if not tied or not codes_tied:
        out = model.token if model.out is None else model.out
        writes.weight[first] = 0
        writes.weight[rows] = out.weight.to(writes.weight.dtype)  # type: ignore[operator]
        if getattr(writes, "bias", None) is not None and model.out is not None and model.out.bias is not None:
            writes.bias[rows] = model.out.bias.to(writes.bias.dtype)
    whole.generation_config = type(whole.generation_config)()  # Defaults, without the backbone's settings.
    return whole


def write_folder(model: HfRecommender, options: Mapping[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Write config, safetensors, tokenizer (if the backbone has one) and `nonet.json`, and return the contents of `nonet.json`.

    Args:
        model: The recommender.
        options: The options that it was built from.
        seed: The seed that it was built from.
        folder: The target folder.
    """
    from safetensors.torch import save_file

    tokenizer = (
        read_tokenizer(options, "an export") if has_tokenizer(find_tokenizer_folder(options)) else None
    )
    first = model.backbone.words
    if tokenizer is not None:
        names = [
            START_TOKEN,
            *(
                format_sid_token(level, code)
                for level, size in enumerate(model.codes)
                for code in range(size)
            ),
        ]
        first = len(tokenizer)
        if tokenizer.add_tokens(names) != len(names):
            raise ConfigError(
                f"the tokenizer of {first} words already has some of the {len(names)} tokens for codes; use one without them"
            )
        tokenizer.save_pretrained(folder)
    build_language_model(model, options, seed, first).save_pretrained(folder)
    beside = {
        name: value.contiguous()
        for name, value in model.state_dict().items()
        if not name.startswith("backbone.") and name.partition(".")[0] not in ("token", "start", "out")
    }
    save_file(beside, folder / BESIDE)
    layout = {"head": list(model.layout.head), "lead": list(model.layout.lead)}
    body = {
        "codes": list(model.codes),
        "start": first,
        "first": first + 1,
        **layout,
        "prompt": options.get("prompt"),
    }
    (folder / SIDS).write_text(json.dumps(body, indent=1), encoding="utf-8")
    return body


def load_exported_rows(model: HfRecommender, folder: Path) -> None:
    """Load the rows of START and the codes from the vocabulary of an exported folder.

    Raises:
        ConfigError: The folder has other codes.
    """
    body = json.loads((folder / SIDS).read_text(encoding="utf-8"))
    if list(body["codes"]) != list(model.codes):
        raise ConfigError(
            f"model.path: {folder} was exported with codes {body['codes']} by level, this run has {list(model.codes)}, so the "
            "vocabularies differ. Use the semantic ids of that run (tokenizer: {use: file}), or the original backbone"
        )
    first, tokens = int(body["first"]), len(model.token.weight)
    with torch.no_grad():
        words = model.backbone.model.get_input_embeddings().weight
        model.start.copy_(words[first - 1] * model.backbone.scale)
        model.token.weight.copy_(words[first : first + tokens])
        if model.out is not None:
            out = words if model.backbone.writes is None else model.backbone.writes.weight
            model.out.weight.copy_(out[first : first + tokens])  # type: ignore[index]
            if model.out.bias is not None and model.backbone.writes is not None:
                model.out.bias.copy_(model.backbone.writes.bias[first : first + tokens])  # type: ignore[index]
