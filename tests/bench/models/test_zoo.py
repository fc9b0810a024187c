"""The zoo's ticks are earned, and a cross has its reason; the bench of beams compares like with like."""

import pytest

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from nonet.bench.models import zoo as zoo_module
from nonet.bench.models.zoo import BEGIN, END, TESTS, bench_zoo
from nonet.bench.serving.rollout import bench_rollout


def test_an_architecture_earns_its_ticks():
    (row,) = bench_zoo("llama")["rows"]
    assert {what: row[what] for what in TESTS} == dict.fromkeys(TESTS, "yes")
    assert (row["cache"], row["reason"]) == ("keys and values", "")


def test_what_cannot_be_built_is_a_cross_with_its_reason():
    (row,) = bench_zoo("bert-like")["rows"]
    assert row["SIDs"] == row["resume"] == "no"
    assert "bert-like" in row["reason"]


def test_the_table_is_written_between_its_marks(tmp_path, monkeypatch):
    page = tmp_path / "models.md"
    page.write_text(f"before\n{BEGIN}\nold\n| llama | ✗ |\n| gone | ✓ |\n| gpt2 | ✓ | all |\n{END}\nafter\n")
    monkeypatch.setattr(zoo_module, "PAGE", page)
    row = dict.fromkeys(TESTS, "yes") | {
        "architecture": "llama",
        "cache": "keys and values",
        "sequences": "packed",
        "uni": "no",
        "reason": "uni: a|b",
    }
    zoo_module._write_table([row])
    text = page.read_text()
    assert "| llama | ✓ | ✓ | ✓ | ✓ | ✗ | ✓ | ✓ | ✓ | keys and values | packed | uni: ab |" in text
    assert "2 architectures, 1 with every tick" in text
    assert "| gpt2 | ✓ | all |" in text
    assert "gone" not in text
    assert text.startswith("before")
    assert "old" not in text
    assert text.endswith("after\n")


def test_both_sides_list_the_same_legal_items():
    (row,) = bench_rollout(widths="32", beams="4", items=300, users=2, events=3, layers=1, rounds=1)["rows"]
    assert row["illegal"] == 0
    assert row["same items as (ii)"] > 0.9
