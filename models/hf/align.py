"""Alignment of words and codes (LC-Rec, Zheng et al. 2024): losses of items' codes given their words, and of words given codes.

words... START c1 .. cL        codes are predicted after the words, each among the K of its level
START c1 .. cL words...        words are predicted after the codes, among all words
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nonet.models.hf.text import check_words, encode_text, read_tokenizer

# Shapes: n items, l = L + 1 positions of an item (START and its codes), S positions, P words of a text, m words of all texts, c
# words of a chunk, L levels, D width, V words of the vocabulary.
_MAX_WORDS = 48  # Longer texts are cut; "words" are the text tokens of the backbone.
_CHUNK_WORDS = 128  # Words whose logits exist at a time: 74 MB of fp32 for a vocabulary of 151,936.


def compute_alignment_loss(model: Any, sid_nL: Tensor, texts: Sequence[str]) -> Tensor:
    """Compute the alignment loss of n items in nats, summed over items.

    The loss of an item is that of its codes given its words, plus the mean loss per word of its words given its codes.

    Args:
        model: The recommender.
        sid_nL: Semantic ids of the items.
        texts: Text of each item.
    """
    if model.tokenizer is None:
        model.tokenizer = read_tokenizer(model.options, "a stage of use: align")
    word_ids = [list(encode_text(model.tokenizer, text))[:_MAX_WORDS] or [0] for text in texts]
    check_words(model.tokenizer, model.backbone.words, [max(ids) for ids in word_ids])
    device = sid_nL.device
    counts_n = torch.tensor([len(ids) for ids in word_ids], device=device)
    max_words = int(counts_n.max())
    word_nP = torch.zeros(len(word_ids), max_words, dtype=torch.int64)
    for row, ids in enumerate(word_ids):
        word_nP[row, : len(ids)] = torch.tensor(ids)
    word_nP = word_nP.to(device)
    text_nPD = model.backbone.embed(word_nP).to(model.start.dtype)
    code_nLD, start_n1D = model.embed_codes(sid_nL), model.start.expand(len(word_ids), 1, -1)
    return _compute_code_loss(
        model, text_nPD, counts_n, torch.cat([start_n1D, code_nLD], 1), sid_nL
    ) + _compute_word_loss(model, text_nPD, counts_n, torch.cat([start_n1D, code_nLD], 1), word_nP)


def _compute_code_loss(
    model: Any, text_nPD: Tensor, counts_n: Tensor, item_nlD: Tensor, sid_nL: Tensor
) -> Tensor:
    """Compute the loss of the codes given the words, summed over items, in nats; each item directly follows its text."""
    item_position_nl = counts_n[:, None] + torch.arange(item_nlD.shape[1], device=counts_n.device)
    padded_text_nSD = functional.pad(text_nPD, (0, 0, 0, item_nlD.shape[1]))
    x_nSD = padded_text_nSD.scatter(
        1,
        item_position_nl[..., None].expand(-1, -1, padded_text_nSD.shape[-1]),
        item_nlD.to(padded_text_nSD.dtype),
    )
    state_nSD = model.backbone.read(x_nSD, counts_n + item_nlD.shape[1])
    loss = state_nSD.new_zeros(())
    for level in range(model.levels):
        state_nD = state_nSD[
            torch.arange(len(item_position_nl), device=item_position_nl.device), item_position_nl[:, level]
        ]
        loss = loss + functional.cross_entropy(
            model.compute_code_logits(state_nD, level), sid_nL[:, level], reduction="sum"
        )
    return loss


def _compute_word_loss(
    model: Any, text_nPD: Tensor, counts_n: Tensor, item_nlD: Tensor, word_nP: Tensor
) -> Tensor:
    """Compute the mean loss per word of each text after its item, summed over texts, in nats."""
    x_nSD = torch.cat([item_nlD.to(text_nPD.dtype), text_nPD], 1)
    n_codes = item_nlD.shape[1]
    state_nPD = model.backbone.read(x_nSD, counts_n + n_codes)[:, n_codes - 1 : -1]
    is_word_nP = torch.arange(word_nP.shape[1], device=counts_n.device) < counts_n[:, None]
    weight_m = (1.0 / counts_n).repeat_interleave(counts_n)
    nats: Any = _ChunkedCrossEntropy.apply(
        state_nPD[is_word_nP], word_nP[is_word_nP], weight_m, model.backbone.compute_word_logits
    )
    return nats


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The weighted sum of the cross entropies of m words, of which only a few have logits at a time.

    The output layer of words is frozen, so the forward pass can compute the gradient of the states, chunk by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        state_mD: Tensor,
        word_m: Tensor,
        weight_m: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the sum in nats."""
        total, grads = state_mD.new_zeros(()), []
        for state_cD, word_c, weight_c in zip(
            *(tensor.split(_CHUNK_WORDS) for tensor in (state_mD, word_m, weight_m)), strict=True
        ):
            with torch.enable_grad():
                state_cD = state_cD.detach().requires_grad_()
                nats_c = functional.cross_entropy(compute_logits(state_cD), word_c, reduction="none")
                nats = (nats_c * weight_c).sum()
                grads += torch.autograd.grad(nats, state_cD)
            total += nats.detach()
        ctx.save_for_backward(torch.cat(grads))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient of the states."""
        (grad_mD,) = ctx.saved_tensors
        return grad_mD * grads[0], None, None, None
