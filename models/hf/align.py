"""Alignment of words and codes (LC-Rec, Zheng et al. 2024): losses of items' codes given their words, and of words given codes.

words... START c1 .. cL        codes are predicted after the words, each among the K of its level
START c1 .. cL words...        words are predicted after the codes, among all words
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nonet.models.hf.text import check_words, encode_text, read_tokenizer

# Shapes: n items, S positions, P words of a text, L levels, D width, V words of the vocabulary.
_WORDS = 48  # Maximum number of words of a text.


def compute_alignment_loss(model: Any, sid_nL: Tensor, texts: Sequence[str]) -> Tensor:
    """Compute the loss of n items in nats: of their codes given their words, and per word of their words given their codes.

    Args:
        model: The recommender.
        sid_nL: Semantic ids of the items.
        texts: Text of each item.

    Returns:
        The sum over the items.
    """
    if model.tokenizer is None:
        model.tokenizer = read_tokenizer(model.options, "a stage of use: align")
    words = [list(encode_text(model.tokenizer, text))[:_WORDS] or [0] for text in texts]
    check_words(model.tokenizer, model.backbone.words, [max(each) for each in words])
    device = sid_nL.device
    counts_n = torch.tensor([len(each) for each in words], device=device)
    most = int(counts_n.max())
    word_nP = torch.zeros(len(words), most, dtype=torch.int64)
    for row, each in enumerate(words):
        word_nP[row, : len(each)] = torch.tensor(each)
    word_nP = word_nP.to(device)
    text_nPD = model.backbone.embed(word_nP).to(model.start.dtype)
    code_nLD, start_n1D = model.embed_codes(sid_nL), model.start.expand(len(words), 1, -1)
    return _compute_code_loss(
        model, text_nPD, counts_n, torch.cat([start_n1D, code_nLD], 1), sid_nL
    ) + _compute_word_loss(model, text_nPD, counts_n, torch.cat([start_n1D, code_nLD], 1), word_nP)


def _compute_code_loss(
    model: Any, text_nPD: Tensor, counts_n: Tensor, item_nlD: Tensor, sid_nL: Tensor
) -> Tensor:
    """Compute the loss of the codes given the words. Texts differ in length, so each item follows directly after its text."""
    at_nl = counts_n[:, None] + torch.arange(item_nlD.shape[1], device=counts_n.device)
    room = functional.pad(text_nPD, (0, 0, 0, item_nlD.shape[1]))
    x_nSD = room.scatter(1, at_nl[..., None].expand(-1, -1, room.shape[-1]), item_nlD.to(room.dtype))
    state_nSD = model.backbone.read(x_nSD)
    total = state_nSD.new_zeros(())
    for level in range(model.levels):
        state_nD = state_nSD[torch.arange(len(at_nl), device=at_nl.device), at_nl[:, level]]
        total = total + functional.cross_entropy(
            model.compute_code_logits(state_nD, level), sid_nL[:, level], reduction="sum"
        )
    return total


def _compute_word_loss(
    model: Any, text_nPD: Tensor, counts_n: Tensor, item_nlD: Tensor, word_nP: Tensor
) -> Tensor:
    """Compute the mean loss per word of each text after its item, summed over texts, in nats."""
    x_nSD = torch.cat([item_nlD.to(text_nPD.dtype), text_nPD], 1)
    state_nPD = model.backbone.read(x_nSD)[:, item_nlD.shape[1] - 1 : -1]
    nats_nP = functional.cross_entropy(
        model.backbone.compute_word_logits(state_nPD).flatten(0, 1), word_nP.flatten(), reduction="none"
    ).view_as(word_nP)
    there_nP = torch.arange(word_nP.shape[1], device=counts_n.device) < counts_n[:, None]
    return ((nats_nP * there_nP).sum(1) / counts_n).sum()
