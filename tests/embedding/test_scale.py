"""docs/benchmarks/scale.md is arithmetic over measurements: every number that follows from others is computed again."""

import re
from pathlib import Path

import pytest

from nonet.embedding.tables.spec import TableSpec

DOCS = Path(__file__).parents[2] / "docs"
MEASURED = (
    (DOCS / "benchmarks" / "2026-11.md").read_text(encoding="utf-8").partition("## Sparse rows, for")[2]
)
TEXT = (DOCS / "benchmarks" / "scale.md").read_text(encoding="utf-8") + MEASURED.partition("\n## ")[0]
TABLE, KEYS, WIDTH, HOST, FULL = 10e12, 1 << 20, 64, 1e12, 0.8


def number(pattern):
    """Return the first group of the only match."""
    found = re.findall(pattern, TEXT)
    assert len(found) == 1, (pattern, found)
    return float(found[0].replace(",", ""))


ROW = number(r"key, step \| (\d+) \|")
RESIDENT = number(r"free room, 1 to 2 M rows \| \d+ to (\d+)")
LOOKUP_NS = number(r"distinct key, cold, 8 M rows, uniform \| ([\d.]+) ns")
STEP_NS = number(r"of a distinct key, the same \| ([\d.]+) ns")
SAVE, LOAD = number(r"\| (\d+) MB/s; \d+ MB/s"), number(r"\| \d+ MB/s; (\d+) MB/s")
ROWS = TABLE / ROW
HOSTS = -(-ROWS * RESIDENT // (HOST * FULL))


def test_a_rows_bytes_are_those_of_the_code():
    assert TableSpec(WIDTH).row_bytes == ROW
    assert number(r"with bf16 rows (\d+) B") == TableSpec(WIDTH, dtype="bf16").row_bytes


def test_rows_memory_and_hosts_follow_from_a_rows_bytes():
    assert number(r"= ([\d.]+) G rows of width 64") == pytest.approx(ROWS / 1e9, abs=0.05)
    assert number(r"G x \d+ B = ([\d.]+) TB") == pytest.approx(ROWS * RESIDENT / 1e12, abs=0.05)
    assert number(r"\*\*(\d+) hosts\*\*") == HOSTS


def test_nanoseconds_a_key_follow_from_the_microseconds_of_a_call():
    assert number(r"uniform \| [\d.]+ ns \(([\d,]+) µs / 8,192") * 1e3 / 8192 == pytest.approx(
        LOOKUP_NS, abs=0.5
    )
    assert number(r"the same \| [\d.]+ ns \(([\d,]+) µs / 8,192") * 1e3 / 8192 == pytest.approx(
        STEP_NS, abs=0.5
    )


def test_the_sparse_time_of_a_step_follows_from_a_keys():
    found = re.findall(r"\| (\d+) \(\d+ a host\) \| ([\d,]+) \| ([\d.]+) ms \|", TEXT)
    assert len(found) == 3
    for shards, keys, milliseconds in found:
        share = KEYS / int(shards)
        assert float(keys.replace(",", "")) == pytest.approx(share, abs=1)
        assert float(milliseconds) == pytest.approx(share * STEP_NS / 1e6, abs=0.06)


def test_the_wires_time_follows_from_a_hosts_bytes():
    out = {"fp32": 4 * WIDTH, "fp16": 2 * WIDTH, "int8": WIDTH + 4}
    found = re.findall(r"\| (\d+) Gb/s[^|]*\| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) ms \|", TEXT)
    assert len(found) == 3
    for rate, *times in found:
        for width, milliseconds in zip(out.values(), times, strict=True):
            # The larger way: keys and gradients in.
            expected = KEYS / HOSTS * (8 + width) * 8 / (float(rate) * 1e9) * 1e3
            assert float(milliseconds) == pytest.approx(expected, abs=0.11)


def test_a_checkpoints_time_follows_from_a_processes_rate():
    shards = number(r"Checkpoint\.\*\* At \d+ MB/s a process, (\d+) shards")
    assert number(r"Checkpoint\.\*\* At (\d+) MB/s a process") == SAVE
    assert number(r"write 10 TB in (\d+) s") == pytest.approx(TABLE / shards / SAVE / 1e6, abs=1)
    assert number(r"and need (\d+) GB/s of storage") == pytest.approx(shards * SAVE / 1e3, abs=0.6)
    assert number(r"they load in\s+(\d+) s") == pytest.approx(TABLE / shards / LOAD / 1e6, abs=1)
