"""The loss of words given codes: few words have logits at a time, and loss and gradient are those of all at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nonet.models.hf import align

WORDS, WIDTH, VOCABULARY = 10, 4, 7


@pytest.mark.parametrize("words", [WORDS, 0])
def test_the_cross_entropy_of_chunks_is_that_of_all_words(monkeypatch, words):
    monkeypatch.setattr(align, "_CHUNK_WORDS", 4)
    generator = torch.Generator().manual_seed(0)
    layer = torch.randn(VOCABULARY, WIDTH, generator=generator)
    state_mD = torch.randn(words, WIDTH, generator=generator)
    word_m = torch.randint(VOCABULARY, (words,), generator=generator)
    weight_m = torch.rand(words, generator=generator)
    sizes = []

    def compute_logits(state_cD):
        sizes.append(len(state_cD))
        return torch.tanh(state_cD @ layer.T)

    chunked, whole = (state_mD.clone().requires_grad_() for _ in range(2))
    nats = align._ChunkedCrossEntropy.apply(chunked, word_m, weight_m, compute_logits)
    (3 * nats).backward()
    assert max(sizes) <= 4
    expected = functional.cross_entropy(compute_logits(whole), word_m, reduction="none") @ weight_m
    (3 * expected).backward()
    torch.testing.assert_close(nats.detach(), expected.detach())
    torch.testing.assert_close(chunked.grad, whole.grad)
