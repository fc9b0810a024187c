"""Run the ring scenario with other models: training, rollout and scoring.

The models are HSTU blocks, a depth decoder that attends to the history, and a Hugging Face backbone.
"""

from __future__ import annotations

import io
import threading
import time

import pyarrow.parquet as pq
import pytest
from backbones import folder_of

from nonet.controller.record.checkpoint import Checkpoints, read_manifest
from nonet.deploy.after.recommend import recommend_for
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.deploy.serving.offline import export_run

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
    answer = recommend_for(str(finished.folder.path), ["item b1", "item c2"], None, 5)
    assert all(len(titles) == 5 for titles in answer["columns"].values())
    assert answer["columns"]["rl"][0].startswith("item ")


QWEN3 = (
    "model={use: hf, memory: on, config: {model_type: qwen3, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 8, intermediate_size: 64}}"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_drawn_qwen3_learns_resumes_to_the_same_bits_and_lists_nothing_illegal(ring, ray_local):
    panel = Panel(io.StringIO(), live=False)
    scenario = api.scenario(ring / "ring.yaml", [QWEN3])
    finished = api.run(scenario, run_dir=ring / "whole", panel=panel)
    popularity = finished.report["baselines"]["popularity"]["recall@10"]
    assert finished.report["stages"]["finetune"]["recall@10"] > 1.5 * popularity
    started = api.start(scenario, run_dir=ring / "stopped")
    stopper = threading.Thread(target=_stop_after_a_commit, args=(started,))
    stopper.start()
    started.wait(Panel(io.StringIO(), live=False))
    stopper.join()
    assert started.state == "stopped"
    resumed = api.resume(ring / "stopped", panel=Panel(io.StringIO(), live=False))
    assert _last_commit(resumed) == _last_commit(finished)
    assert resumed.report["stages"] == finished.report["stages"]
    answer = recommend_for(str(finished.folder.path), ["item b1", "item c2"], None, 10)
    titles = set(pq.read_table(ring / "items.parquet")["title"].to_pylist())
    assert all(set(column) <= titles for column in answer["columns"].values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_folder_with_words_is_aligned_learns_by_lora_and_is_exported(ring, ray_local):
    from transformers import AutoModelForCausalLM

    folder_of(ring / "base")
    changes = [
        f"model={{use: hf, path: {ring / 'base'}, lora: {{rank: 4}}, attention: uni, prompt: 'films liked : {{history}} next'}}",
        "stages.pretrain={use: align, epochs: 2, batch: {users: 10}, lr: 3e-3, items: 10}",
        f"tokenizer.vectors=[{{use: hf, path: {ring / 'base'}}}, categories, cooccurrence]",
    ]
    panel = Panel(io.StringIO(), live=False)
    finished = api.run(api.scenario(ring / "ring.yaml", changes), run_dir=ring / "words", panel=panel)
    assert set(finished.report["stages"]) == {"pretrain", "finetune", "rl"}
    metrics = finished.folder.metrics.read_text()
    assert '"align_loss"' in metrics
    export_run(str(finished.folder.path), ring / "out")
    whole = AutoModelForCausalLM.from_pretrained(ring / "out" / "transformers")
    assert whole.config.vocab_size >= 15 + 1 + 12


def _stop_after_a_commit(started):
    while not list(started.folder.checkpoints.glob("step-*/manifest.json")):
        time.sleep(0.05)
    started.stop()


def _last_commit(run):
    path, _ = Checkpoints(run.folder.checkpoints).find_newest()
    return read_manifest(path).files
