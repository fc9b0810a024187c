"""The ring scenario with HSTU blocks and a depth decoder that attends to the history: trained, rolled out, asked again."""

from __future__ import annotations

import io

import pytest

from nonet.deploy.after.recommend import recommend_for
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel

MODEL = (
    "model={use: sid_decoder, width: 16, layers: 1, heads: 2, dropout: 0.0, block: hstu, depth: attention}"
)


@pytest.mark.slow
def test_a_run_learns_with_hstu_blocks_and_depth_attention_and_answers_from_its_commit(ring, ray_local):
    panel = Panel(io.StringIO(), live=False)
    finished = api.run(api.scenario(ring / "ring.yaml", [MODEL]), run_dir=ring / "whole", panel=panel)
    report = finished.report
    popularity = report["baselines"]["popularity"]["recall@10"]
    assert report["stages"]["finetune"]["recall@10"] > 1.5 * popularity
    # As wide as a quarter of the catalogue, a beam finds nearly what ranking all items finds.
    test = {way: found["all"] for way, found in report["detail"]["rl"]["test"].items()}
    assert test["beam"]["recall@10"] == pytest.approx(test["exhaustive"]["recall@10"], abs=0.1)
    assert "model.block: hstu" in report["receipt"]["note"]
    answer = recommend_for(str(finished.folder.path), ["item b1", "item c2"], None, 5)
    assert all(len(titles) == 5 for titles in answer["columns"].values())
    assert answer["columns"]["rl"][0].startswith("item ")
