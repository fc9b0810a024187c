"""`nonet samples`: what a scenario's stages read, and what files hold."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from nonet.deploy.cli import app


def test_a_scenario_says_what_its_stages_read():
    said = CliRunner().invoke(app, ["samples", "explain", "quickstart"]).stdout
    assert "source shuffled, seed 7" in said
    assert "pretrain: 8 users per global step" in said
    assert "finetune: 8 users per global step (batch.users); trains on events with rating >= 4" in said
    assert "rl: 64 prompts per global step" in said


def test_files_are_counted_in_one_pass(tmp_path):
    rows = pa.table({"user": [1, 2, None, 4], "items": [[1], [2, 3], [4], []], "name": ["a", None, "c", "d"]})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=3)
    said = CliRunner().invoke(app, ["samples", "stats", str(tmp_path)]).stdout
    assert "1 files" in said
    assert "2 row groups, 4 rows" in said
    assert "bad rows (missing ids, or ids above 2^63): 1" in said
    assert (
        "items: list<element: int64>, 0 missing, 1 to 3, lengths: median 1, 99th percentile 2, maximum 2"
        in said
    )
    assert "name: string, 1 missing" in said
