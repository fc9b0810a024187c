"""Creation of a HfRecommender from the options of a scenario, and the choices whether it uses a cache and packs sequences."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nonet.models.hf import lora
from nonet.models.hf.backbone import (
    Backbone,
    HfCache,
    check_uni,
    freeze,
    set_packing,
)
from nonet.models.hf.config import SIDS, fetch_folders, format_error, read_config, shrink_config
from nonet.models.hf.language_model import build_causal_lm, hash_folder
from nonet.models.hf.model import HfRecommender
from nonet.models.hf.text import make_layout
from nonet.plugins import load_heavy

# Largest difference between two computations of the same numbers in fp32, relative to the largest one: of logits with and
# without a cache, or of states of packed and padded sequences.
_FP32_TOLERANCE = 1e-3
# The same in reduced precision, in units of its epsilon: for the largest difference, and for the norm of all differences.
# A cache that a backbone cannot use differs by more (MPT's by 29 and 20 units of bf16), rounding through 24 layers by less
# (7 and 6 units of fp16).
_MAX_TOLERANCE_EPS, _NORM_TOLERANCE_EPS = 16, 8
_log = logging.getLogger(__name__)


def build(
    options: Mapping[str, Any], codes: Sequence[int], features: Mapping[str, int], seed: int
) -> HfRecommender:
    """Create a recommender; weights that are not loaded are drawn from `seed`.

    Args:
        options: Options of the model.
        codes: Number of codes K of every level.
        features: Width of the rows by sparse feature.
        seed: Seed of the run.

    Raises:
        ConfigError: The model cannot be created with these options.
    """
    backbone = Backbone(build_causal_lm(options, seed))
    has_values = backbone.model.get_input_embeddings().weight.device.type != "meta"
    if has_values and options.get("attention") == "uni":
        check_uni(backbone)
    layout = make_layout(options, len(codes), backbone.words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if options.get("lora"):
            freeze(backbone.model)
            lora.add(backbone.model, options["lora"])
        model = HfRecommender(backbone, layout, codes, features, tied=options.get("tied"))
    model.options = dict(options)
    if path := fetch_folders(options).get("path"):
        model.base_sha256 = hash_folder(path)
        if (Path(path) / SIDS).is_file():
            load_heavy("nonet.models.hf.export:load_exported_rows")(model, Path(path))
    if has_values:
        choose_caching(model)
        choose_packing(model)
    else:
        _choose_with_smaller_model(model, seed)
    return model


def _choose_with_smaller_model(model: HfRecommender, seed: int) -> None:
    """Make the choices of `choose_caching` and `choose_packing` with a smaller model, since this one has no values yet.

    The smaller model has few words, a layer of each kind, and drawn weights.
    """

    def build_smaller() -> HfRecommender:
        options = model.options
        backbone = Backbone(build_causal_lm(options, seed, shrink_config(read_config(options))))
        if options.get("attention") == "uni":
            check_uni(backbone)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            smaller = HfRecommender(backbone, model.layout, model.codes, {}, tied=options.get("tied"))
        choose_caching(smaller)
        choose_packing(smaller)
        return smaller

    with ThreadPoolExecutor(1) as thread:  # The modes that make meta tensors are those of this thread.
        smaller = thread.submit(build_smaller).result()
    model.caches, model.no_cache = smaller.caches, smaller.no_cache
    set_packing(model.backbone, packs=smaller.backbone.packs)


@torch.no_grad()
def choose_caching(model: HfRecommender) -> None:
    """Set `model.caches`: whether steps with a key-value cache give the same logits as reading the whole sequence again.

    This is tested on two sequences, with the tolerance of the backbone's precision. Backbones with another kind of memory
    (state spaces, masks with biases by distance) read the whole sequence again, which is logged and explained in `no_cache`.
    """
    if model.levels < 2:
        return
    was_training = model.training
    model.eval()
    try:
        model.no_cache = _explain_no_caching(model)
    finally:
        model.train(was_training)
    model.caches = model.no_cache is None
    if model.no_cache:
        _log.warning(
            "%s: the model computes the whole history again for each code of a beam: %s",
            type(model.backbone.model).__name__,
            model.no_cache,
        )


def _explain_no_caching(model: HfRecommender) -> str | None:
    """Return the reason why the key-value cache cannot be used; None if it can."""
    lengths = torch.tensor([model.layout.count_positions(events) for events in (2, 1)])
    x = model.token.weight[torch.arange(2 * int(lengths[0])) % len(model.token.weight)].view(
        2, int(lengths[0]), -1
    )
    prefixes = torch.zeros(2, 2, model.levels - 1, dtype=torch.int64)
    prefixes[:, 1] = torch.tensor([size - 1 for size in model.codes[:-1]])
    try:
        _, kv = model.backbone.prefill(x)
        cache = HfCache(x[:, -1], x, lengths, kv)
        cached_logits = [model.step(cache, prefixes, level) for level in range(1, model.levels)]
    except Exception as error:  # Architectures without such a cache raise various exceptions.
        return f"this backbone has no key-value cache that prefixes can continue ({type(error).__name__})"
    cache = HfCache(x[:, -1], x, lengths, kv=None)
    uncached_logits = [model.step(cache, prefixes, level) for level in range(1, model.levels)]
    difference = _describe_difference(cached_logits, uncached_logits, model.backbone.dtype)
    return difference and f"steps with the key-value cache differ by {difference} from those without it"


@torch.no_grad()
def choose_packing(model: HfRecommender) -> None:
    """Set whether training packs sequences behind one another: if two packed sequences have the same states as two padded ones.

    Sequences are padded for backbones that carry a state from one position to the next or make masks themselves, and if
    `model.attention` is eager. The reason is logged.
    """
    was_training = model.training
    try:
        with torch.random.fork_rng(devices=[]):
            reason = _explain_no_packing(model)
    finally:
        model.train(was_training)
    if reason:
        set_packing(model.backbone, packs=False)
        _log.warning("%s: sequences are padded in training: %s", type(model.backbone.model).__name__, reason)


def _explain_no_packing(model: HfRecommender) -> str | None:
    """Let the backbone pack, and return the reason why it must not; None if it may."""
    lengths = torch.tensor([int(model.layout.count_positions(events)) for events in (1, 2)])
    x = model.token.weight[torch.arange(int(lengths.sum())) % len(model.token.weight)]
    first, second = x.split(lengths.tolist())
    backbone = model.backbone
    try:
        set_packing(backbone, packs=True)
        backbone.train().read_packed(x, lengths)  # Dropout of attention weights is refused.
        packed = backbone.eval().read_packed(x, lengths)
    except Exception as error:  # Architectures raise various exceptions.
        return f"it cannot compute packed sequences ({format_error(error)})"
    padded = backbone.read(pad_sequence([first, second], batch_first=True))
    alone = torch.cat([padded[0, : len(first)], padded[1]])
    difference = _describe_difference([packed], [alone], backbone.dtype)
    return difference and f"states of packed sequences differ by {difference} from those of padded ones"


def _describe_difference(
    found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype
) -> str | None:
    """Return by how much tensors computed in a dtype differ; None if rounding explains it."""
    pairs = list(zip(found, expected, strict=True))
    max_difference = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs)
    norm_difference = max(float((a - b).norm() / b.norm().clamp_min(1e-3)) for a, b in pairs)
    epsilon, is_fp32 = torch.finfo(dtype).eps, dtype == torch.float32
    max_tolerance = _FP32_TOLERANCE if is_fp32 else _MAX_TOLERANCE_EPS * epsilon
    if max_difference <= max_tolerance and (is_fp32 or norm_difference <= _NORM_TOLERANCE_EPS * epsilon):
        return None
    return f"{max_difference:.2g} of the largest one (allowed in {dtype}: {max_tolerance:.2g})"
