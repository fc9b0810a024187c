"""Engines that recompute, by kinds of models and stages: each is refused by the plan, or takes the steps of a plain engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_roles import played
from likes_world import make_likes
from ring_world import Ring

from nonet.controller.scenario import load_scenario
from nonet.controller.scenario.checks import check_scenario
from nonet.errors import ConfigError
from tests.workers.engines.test_divided_rl import ALGORITHMS, MODELS, NEEDS_DEEPSPEED

ENGINES = {
    "use: ddp, recompute: true": (1, 1),
    "use: fsdp2, recompute: true": (2, 2),
    "use: fsdp2, tensor: 2, recompute: true": (2, 1),
    "use: fsdp2, replicate: 2, recompute: true": (4, 4),
    "use: deepspeed, zero: 1, recompute: true": (2, 2),
    "use: deepspeed, zero: 3, recompute: true": (2, 2),
}
"""By options of the engine, the number of trainers, and that of the shares of a batch."""

RL = [
    ["begin", "pretrain"],
    ["train", "pretrain", 0, 1],
    ["fit_memory"],
    ["begin", "rl"],
    ["update", "rl", 0, 2],
]
CLICKS = [["begin", "train"], ["train", "train", 0, 2]]
REFUSED = {
    ("hstu", "tensor: 2"): "tensor: 2 and model.block: hstu",
    ("qwen3 with lora", "tensor: 2"): "tensor: 2 and model.lora",
    ("without a cache", "tensor: 2"): "tensor: 2 and model_type mpt",
    ("clicks", ""): "with a model that has no blocks",
}
"""What the plan says of a kind of model with engines whose options have a text."""

CELLS = [
    pytest.param(model, engine, marks=[NEEDS_DEEPSPEED] if "deepspeed" in engine else [])
    for model in [*MODELS, "clicks"]
    for engine in ENGINES
    if model != "recompute"
]


class Worlds:
    """The scenarios of the kinds of models, and what plain engines record of each."""

    def __init__(self, folder: Path):
        self._folder = folder
        (folder / "ring").mkdir()
        (folder / "likes").mkdir()
        self._ring = Ring(folder / "ring")
        self._likes = make_likes(folder / "likes") / "likes.yaml"
        self._plain: dict[tuple[str, int], Any] = {}

    def describe(self, model: str, engine: str, trainers: int) -> tuple[Path, list[str], list[Any]]:
        """Return the scenario, its changes and the acts of a cell."""
        if model == "clicks":
            scenario, acts, changes, stages = self._likes, CLICKS, ["model.dropout=0.0"], ("train",)
        else:
            scenario, acts, stages = self._ring.scenario, RL, ("pretrain", "rl")
            changes = ["stages.rl.users=8", *MODELS[model], f"stages.rl.algorithm={{{ALGORITHMS['grpo']}}}"]
        adamw = [f"stages.{stage}.optimizer={{use: adamw}}" for stage in stages]
        return (
            scenario,
            [*changes, *adamw, f"roles.trainer={{workers: {trainers}, engine: {{{engine}}}}}"],
            acts,
        )

    def play(self, model: str, engine: str, trainers: int, folder: Path) -> list[dict[str, float]]:
        """Return the records of the first rank."""
        scenario, changes, acts = self.describe(model, engine, trainers)
        return played(scenario, folder, acts, changes=changes, trainers=trainers)[0]["records"]

    def play_plain(self, model: str, shares: int) -> list[dict[str, float]]:
        """Return the records of ranks that hold the whole model and recompute nothing."""
        if (model, shares) not in self._plain:
            folder = self._folder / f"{model}-{shares}"
            self._plain[model, shares] = self.play(model, "use: ddp", shares, folder)
        return self._plain[model, shares]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("cells"))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "engine"), CELLS)
def test_recomputed_blocks_take_the_same_steps_in_every_stage_or_the_plan_refuses_them(
    worlds: Worlds, tmp_path: Path, model: str, engine: str
):
    trainers, shares = ENGINES[engine]
    scenario, changes, _ = worlds.describe(model, engine, trainers)
    loaded = load_scenario(scenario, changes)[0]
    for (kind, options), said in REFUSED.items():
        if kind == model and options in engine:
            with pytest.raises(ConfigError, match=said):
                check_scenario(loaded)
            return
    check_scenario(loaded)
    records = worlds.play(model, engine, trainers, tmp_path)
    assert records
    for other, plain in zip(records, worlds.play_plain(model, shares), strict=True):
        assert other == pytest.approx(plain, rel=1e-4, abs=1e-6)
