from __future__ import annotations

import pytest

from nonet.units import parse_bytes, parse_seconds


def test_units_are_read():
    assert [parse_seconds(x) for x in ("2s", "1.5h", "30d", "100ms", 7)] == [2, 5400, 30 * 86400, 0.1, 7]
    assert [parse_bytes(x) for x in ("1.5TB", "512MiB", "1kb", 10)] == [
        1_500_000_000_000,
        512 * 1024**2,
        1000,
        10,
    ]


@pytest.mark.parametrize("text", ["30x", "", "d", True, "-3s"])
def test_other_words_name_the_units(text):
    with pytest.raises(ValueError, match=r"expected a duration .* \(units: ms, s"):
        parse_seconds(text)
