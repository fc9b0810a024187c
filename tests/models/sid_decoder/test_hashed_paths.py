"""How many hashed paths a level looks up: counted, because each is a row of a table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sid_batches import CODES, model_of

from nonet.models.generation import Trie, score_items
from nonet.models.sid_decoder import depth
from nonet.models.sid_decoder.beam_cache import DecoderCache


@pytest.fixture
def looked_up(monkeypatch):
    """Record the number of paths of each lookup."""
    sizes, hashed = [], depth._hash_path

    def count(path, code):
        rows = hashed(path, code)
        sizes.append(rows.numel())
        return rows

    monkeypatch.setattr(depth, "_hash_path", count)
    return sizes


def test_a_step_looks_up_the_paths_of_shared_prefixes_once_for_all_prompts(looked_up):
    model, users, beams = model_of().eval(), 5, 3
    cache, prefix = DecoderCache(torch.randn(users, 16)), torch.zeros(1, beams, 1).long()
    with torch.no_grad():
        model.step(cache, prefix.expand(users, -1, -1), 1)
        model.step(cache, prefix.repeat(users, 1, 1), 1)
    assert looked_up == [beams * CODES[1], users * beams * CODES[1]]


def test_no_path_is_looked_up_before_the_first_code(looked_up):
    with torch.no_grad():
        model_of().eval().step(DecoderCache(torch.randn(5, 16)), torch.zeros(5, 1, 0).long(), 0)
    assert looked_up == []


@pytest.mark.parametrize("users", [1, 40])
def test_scores_of_all_items_look_up_the_paths_of_the_catalogue_once_for_all_prompts(looked_up, users):
    every = np.stack(np.meshgrid(*(np.arange(codes) for codes in CODES), indexing="ij"), -1).reshape(-1, 4)
    sids = every[np.random.default_rng(0).choice(len(every), 30, replace=False)].astype(np.int32)
    paths = 0
    for level in range(1, len(CODES)):
        prefixes = np.unique(sids[:, : level + 1], axis=0)[:, :level]
        children = np.unique(prefixes, axis=0, return_counts=True)[1]
        paths += int(
            children[children > 1].sum()
        )  # a child without siblings is certain: its path is not looked up
    assert paths < sids.size
    score_items(model_of(), DecoderCache(torch.randn(users, 16)), Trie.build(sids, CODES))
    assert sum(looked_up) == paths
