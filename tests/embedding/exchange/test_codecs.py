import pytest
import torch

from nonet.embedding.exchange.codecs import get_codec
from nonet.errors import ConfigError, DataError


def rows(dim, count):
    source = torch.Generator().manual_seed(dim)
    return torch.randn(count, dim, generator=source) * torch.logspace(-6, 3, count)[:, None]


@pytest.mark.parametrize(("dim", "count"), [(1, 200), (3, 1), (64, 200), (4096, 20)])
# The error of a value, of its own size or of its row's largest: fp16 below 6e-5 loses bits, hence the absolute part.
@pytest.mark.parametrize(
    ("name", "relative", "of_row"),
    [("fp32", 0, 0), ("fp16", 2**-11, 0), ("bf16", 2**-8, 0), ("int8", 0, 1 / 253)],
)
def test_rows_come_back_within_the_codecs_rounding(name, dim, count, relative, of_row):
    given = rows(dim, count)
    wire = get_codec(name)
    sent = wire.encode(given)
    assert sent.dtype == torch.uint8
    assert list(sent.shape) == [len(given), wire.row_bytes(dim)]
    error = (wire.decode(sent, dim) - given).abs()
    limit = (
        relative * given.abs() + of_row * given.abs().amax(1, keepdim=True) + (3e-8 if name == "fp16" else 0)
    )
    assert bool((error <= limit).all())


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "int8"])
def test_no_rows_and_rows_of_zeros_are_legal(name):
    wire = get_codec(name)
    assert list(wire.decode(wire.encode(torch.empty(0, 5)), 5).shape) == [0, 5]
    assert wire.decode(wire.encode(torch.zeros(4, 5)), 5).abs().sum() == 0


def test_int8_refuses_rows_that_are_not_finite_and_fp16_saturates():
    bad = torch.ones(3, 4)
    bad[1, 2] = float("nan")
    with pytest.raises(DataError, match=r"rows \[1\] of 3 are not finite"):
        get_codec("int8").encode(bad)
    assert get_codec("fp16").decode(get_codec("fp16").encode(torch.full((1, 2), 1e9)), 2).tolist() == [
        [65504.0] * 2
    ]


def test_int8_keeps_the_order_of_numbers_too_small_for_a_scale():
    for size in (1e-34, 1e-36, 1e-37, 1e-38, 1e-42):
        given = torch.tensor([[size, -size / 2, size / 4]])
        back = get_codec("int8").decode(get_codec("int8").encode(given), 3)
        assert float((back - given).abs().max()) <= max(size / 253, 1e-37)


def test_an_unknown_codec_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="no wire codec 'fp8'; choose one of: fp32, fp16, bf16, int8"):
        get_codec("fp8")
