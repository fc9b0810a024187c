"""BeamCache against attention over every beam's whole sequence, and against the beam tree mask."""

import pytest
import torch

from nonet.attention.attention import uni_attention
from nonet.attention.beams import BeamCache
from nonet.attention.masks.mask import UniMask
from nonet.errors import ConfigError

PROMPTS, BEAMS, HEADS, GROUPS, WIDTH, VALUE = 3, 4, 4, 2, 8, 6
LENGTHS = [5, 0, 300]


def draw(*size):
    draw.generator = getattr(draw, "generator", None) or torch.Generator().manual_seed(0)
    return torch.randn(*size, dtype=torch.float64, generator=draw.generator)


def softmax_attention(q, keys, values):
    """One query [H, D] over its keys [N, G, D]."""
    keys, values = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (keys, values))
    weight = (torch.einsum("hd,nhd->hn", q, keys) * WIDTH**-0.5).softmax(-1)
    return torch.einsum("hn,nhe->he", weight, values)


def test_three_steps_with_reordering_equal_attention_over_whole_sequences():
    cuts = torch.tensor([0, *LENGTHS]).cumsum(0)
    keys, values = draw(sum(LENGTHS), GROUPS, WIDTH), draw(sum(LENGTHS), GROUPS, VALUE)
    cache = BeamCache(keys, values, cuts)
    lines = [[[] for _ in range(BEAMS)] for _ in range(PROMPTS)]
    generator = torch.Generator().manual_seed(7)
    for step in range(3):
        if step:
            parent = torch.randint(0, BEAMS, (PROMPTS, BEAMS), generator=generator)
            cache.reorder_beams(parent)
            lines = [[list(lines[u][parent[u, w]]) for w in range(BEAMS)] for u in range(PROMPTS)]
        k, v = draw(PROMPTS, BEAMS, GROUPS, WIDTH), draw(PROMPTS, BEAMS, GROUPS, VALUE)
        cache.append(k, v)
        q = draw(PROMPTS, BEAMS, HEADS, WIDTH)
        got = cache.attend(q)
        for u in range(PROMPTS):
            rows = slice(int(cuts[u]), int(cuts[u + 1]))
            for w in range(BEAMS):
                lines[u][w].append((k[u, w], v[u, w]))
                own_k, own_v = (torch.stack(x) for x in zip(*lines[u][w], strict=True))
                want = softmax_attention(
                    q[u, w], torch.cat([keys[rows], own_k]), torch.cat([values[rows], own_v])
                )
                torch.testing.assert_close(got[u, w], want, atol=1e-12, rtol=0)


def test_the_last_level_equals_the_beam_tree_mask_over_one_packed_sequence():
    history, levels = 40, 3
    parents = torch.tensor([[0, 0, 2, 1], [3, 1, 1, 0]])
    total = history + levels * BEAMS
    q, k, v = draw(total, HEADS, WIDTH), draw(total, GROUPS, WIDTH), draw(total, GROUPS, VALUE)
    whole = uni_attention(
        q, k, v, mask=UniMask.beam_tree(history, parents), cu_seqlens_q=torch.tensor([0, total])
    )
    cache = BeamCache(k[:history], v[:history], torch.tensor([0, history]))
    for level in range(levels):
        rows = slice(history + level * BEAMS, history + (level + 1) * BEAMS)
        if level:
            cache.reorder_beams(parents[level - 1][None])
        cache.append(k[rows][None], v[rows][None])
        torch.testing.assert_close(cache.attend(q[rows][None])[0], whole[rows], atol=1e-12, rtol=0)


def test_beams_may_begin_with_what_they_have_and_share_it_over_prompts():
    cuts, lengths = torch.tensor([0, *LENGTHS]).cumsum(0), 2
    keys, values = draw(sum(LENGTHS), GROUPS, WIDTH), draw(sum(LENGTHS), GROUPS, VALUE)
    own_k, own_v = draw(1, BEAMS, lengths, GROUPS, WIDTH), draw(1, BEAMS, lengths, GROUPS, VALUE)
    q = draw(PROMPTS, BEAMS, HEADS, WIDTH)
    grown = BeamCache(keys, values, cuts)
    for token in range(lengths):
        grown.append(*(x[:, :, token].expand(PROMPTS, -1, -1, -1) for x in (own_k, own_v)))
    shared = BeamCache(keys, values, cuts, own_k, own_v)
    torch.testing.assert_close(shared.attend(q), grown.attend(q), atol=1e-12, rtol=0)
    nothing = own_k[:, :, :0], own_v[:, :, :0]
    alone = BeamCache(keys, values, cuts)
    assert torch.equal(BeamCache(keys, values, cuts, *nothing).attend(q), alone.attend(q))


def test_before_the_first_token_beams_see_the_prompt_alone():
    keys, values = draw(9, GROUPS, WIDTH), draw(9, GROUPS, VALUE)
    q = draw(1, BEAMS, HEADS, WIDTH)
    got = BeamCache(keys, values, torch.tensor([0, 9])).attend(q)
    for w in range(BEAMS):
        torch.testing.assert_close(got[0, w], softmax_attention(q[0, w], keys, values), atol=1e-12, rtol=0)


def test_wrong_shapes_are_named():
    cache = BeamCache(draw(9, GROUPS, WIDTH), draw(9, GROUPS, VALUE), torch.tensor([0, 9]))
    with pytest.raises(ConfigError, match=r"append takes keys \[1, W, 2, 8\]"):
        cache.append(draw(2, BEAMS, GROUPS, WIDTH), draw(2, BEAMS, GROUPS, VALUE))
    with pytest.raises(ConfigError, match=r"own keys \[1 or 1, W, L, 2, 8\]"):
        BeamCache(
            *(draw(9, GROUPS, n) for n in (WIDTH, VALUE)),
            torch.tensor([0, 9]),
            draw(2, 4, 1, 2, 8),
            draw(2, 4, 1, 2, 6),
        )
    with pytest.raises(ConfigError, match="BeamCache takes prefix keys"):
        BeamCache(draw(9, GROUPS, WIDTH), draw(8, GROUPS, VALUE), torch.tensor([0, 9]))
