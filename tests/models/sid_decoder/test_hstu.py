"""The HSTU block against its published formula, and that a candidate is scored alike alone and among others."""

import pytest
import torch

from nonet.attention.masks.mask import UniMask
from nonet.errors import ConfigError
from nonet.models.sid_decoder.hstu import HstuBlock

WIDTH, HEADS, LENGTH = 16, 2, 32


def block(**options):
    torch.manual_seed(0)
    made = HstuBlock(WIDTH, HEADS, LENGTH, **options).double()
    torch.nn.init.normal_(made.position)
    if made.time is not None:
        torch.nn.init.normal_(made.time)
    return made


def test_block_equals_the_formula_written_out_for_one_sequence():
    made, n = block(value_width=4), 9
    x = torch.randn(n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    time = torch.tensor([0, 5, 5, 60, 3600, 3601, 9000, 90000, 90001]).int()
    got = made(x, torch.tensor([0, n]), UniMask.causal(), time)
    mixed = torch.nn.functional.silu(made.uvqk(made.norm(x)))
    u, v, q, k = mixed.split([8, 8, 16, 16], -1)
    heads = []
    for h in range(HEADS):
        score = q[:, 8 * h : 8 * h + 8] @ k[:, 8 * h : 8 * h + 8].T * 8**-0.5
        for i in range(n):
            for j in range(n):
                seconds = max(1, abs(int(time[i]) - int(time[j])))
                power = seconds.bit_length() - 1  # log2 with straight lines between powers of two
                bucket = int(2 * (power + seconds / 2**power - 1))
                score[i, j] = score[i, j] + made.position[0, j - i + LENGTH - 1] + made.time[0, bucket]
        heads.append((torch.nn.functional.silu(score) / LENGTH).tril() @ v[:, 4 * h : 4 * h + 4])
    want = x + made.merge(made.out_norm(torch.cat(heads, 1)) * u)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    got.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


def test_a_candidate_is_scored_alike_alone_and_among_others_whatever_the_batch():
    made = block(time=False)
    draw = torch.Generator().manual_seed(2)
    history, candidates, other = (
        torch.randn(n, WIDTH, dtype=torch.float64, generator=draw) for n in (6, 3, 20)
    )
    together = torch.cat([history, candidates, other])
    many = made(together, torch.tensor([0, 9, 29]), UniMask.hstu(torch.tensor([3, 0])))
    # A table bounds a candidate's place, so each is asked at its own distance from the history: position 6.
    alone = made(torch.cat([history, candidates[:1]]), torch.tensor([0, 7]), UniMask.hstu(1))
    torch.testing.assert_close(many[6], alone[6], atol=1e-13, rtol=0)


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match="multiple of heads"):
        HstuBlock(15, 2, 8)
    with pytest.raises(ConfigError, match="time_T"):
        block()(torch.zeros(3, WIDTH).double(), torch.tensor([0, 3]), UniMask.causal())
