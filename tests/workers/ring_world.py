"""Trainer, shard and rollout of the ring (tests_ring.py) in this process, without Ray: one call away from any step of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests_ring import make_ring, write_tables

from nonet.controller.scenario.scenario import Scenario, load_scenario
from nonet.controller.setup.run_files import make_data_setup
from nonet.controller.setup.worker_setup import get_trained_counts, make_run_setup, make_stage_setups
from nonet.embedding.reading.reader import make_update
from nonet.models.generation.corpus import Corpus
from nonet.plugins import load_heavy
from nonet.workers.engines import MEASURED
from nonet.workers.roles import RolloutRequest, UpdateRequest
from nonet.workers.roles.artifacts import KnownRun
from nonet.workers.roles.artifacts.tokenizer import Tokeniser
from nonet.workers.roles.embedding import EmbeddingShard
from nonet.workers.roles.rollout import Rollout
from nonet.workers.roles.trainer import Trainer
from nonet.workers.runtime.worker import Place

WIDTH = 4
_OF_UPDATE = ("sid", "valid", "logp", "user", "position")


class Prepared:
    """A scenario's data, prepared once into a folder by the model's own class; `world` makes roles over them."""

    def __init__(
        self, scenario: Path, folder: Path, known: KnownRun | None = None, beside: Path | None = None
    ):
        self.scenario = scenario
        loaded, parent = load_scenario(scenario)
        tokeniser = get_role(loaded, "tokenise", Tokeniser)()
        self.facts = tokeniser.prepare(make_data_setup(loaded, beside or parent, known), str(folder))
        self.folders = {kind: artifact["path"] for kind, artifact in self.facts["artifacts"].items()}

    def world(self, *changes: str) -> World:
        return World(self, changes)


class Ring(Prepared):
    """The ring, tokenised once into a folder; `world` makes roles over it, whatever changes of the scenario they have."""

    def __init__(self, folder: Path, known: KnownRun | None = None, **sizes: int):
        scenario = make_ring(folder) / "ring.yaml"
        if sizes:
            write_tables(folder, **sizes)
        super().__init__(scenario, folder, known)

    def known(self) -> KnownRun:
        """Return this ring as the run that another one starts from."""
        codes = tuple(self.facts["tokenizer"]["codes"])
        return KnownRun("ring", self.folders["sequences"], self.folders["sids"], codes)

    def corpus(self) -> Corpus:
        return Corpus.load(self.folders)


def get_role(scenario: Scenario, name: str, shipped: type) -> Any:
    """Return the class of a role: the one that the model has for it, or else the shipped one."""
    return load_heavy(scenario.model.spec.roles.get(name, shipped))


class World:
    """A trainer, its shard and, for lists, its rollout, fused, with what a run of the scenario tells them."""

    def __init__(self, ring: Prepared, changes: tuple[str, ...] = ()):
        scenario, _ = load_scenario(ring.scenario, list(changes))
        data = ring.facts["data"]
        self.run = make_run_setup(scenario)
        self.stages = make_stage_setups(
            scenario,
            **get_trained_counts(data),
            first_step=ring.facts.get("init", {}).get("step", 0),
        )
        self.shard, self.trainer = EmbeddingShard(self.run), get_role(scenario, "trainer", Trainer)(self.run)
        self.trainer.place = Place(role="trainer", peers={"embedding": self.shard})
        self.trainer.open(ring.folders)
        if scenario.model.spec.makes_lists:
            self.rollout = Rollout(self.run)
            self.rollout.place = Place(
                role="rollout", peers={"trainer": self.trainer, "embedding": self.shard}
            )
            self.rollout.open(ring.folders)
        self._version = 0

    def train(self, name: str, start: int = 0, stop: int | None = None) -> list[dict[str, float]]:
        """Supervised steps of a stage, begun when from 0; their records without seconds."""
        stage = self.stages[name]
        if start == 0:
            self.trainer.begin(stage)
        records = self.trainer.train(stage, start, stage.steps if stop is None else stop)
        return [_without_time(record) for record in records]

    def beams(self, step: int = 0, width: int = WIDTH, stage: str = "rl") -> dict[str, Any]:
        """Return the current policy's beams for the prompts of an RL step, as sent over the wire."""
        self._version += 1
        self.rollout.apply(self._version)
        users, positions = self.rollout.lease(stage, step, self.stages[stage].users)
        return self.rollout.generate(users, positions, RolloutRequest(stage, step, width, self._version))

    def update(
        self, beams: dict[str, Any], scores: dict[str, np.ndarray], step: int = 0, stage: Any = None
    ) -> dict[str, float]:
        """Take one RL step and return its record without seconds. `stage`: settings from this step on."""
        if stage is not None and self.trainer._learner is not None:
            self.trainer._learner.stage = stage
        asked = {name: beams[name] for name in _OF_UPDATE}
        return _without_time(
            self.trainer.update(UpdateRequest(stage or self.stages["rl"], step), asked, scores)
        )

    def weights(self) -> torch.Tensor:
        """All dense weights, one after the other."""
        return torch.cat([p.detach().reshape(-1) for p in self.trainer.model.parameters()])

    def rows(self, table: str = "item") -> tuple[np.ndarray, np.ndarray]:
        """All keys [N] that a table holds, ascending, and their rows [N, D]."""
        parts = make_update({table: self.shard.sparse.tables[table]}, 1)["tables"][table]
        key = np.concatenate([part["key"].to_numpy() for part in parts])
        row = np.concatenate([np.stack(part["row"].to_numpy()) for part in parts])
        order = np.argsort(key)
        return key[order], row[order]

    def states(self) -> dict[str, str]:
        """Return a hash of each table's rows, optimizer state and steps."""
        return {name: table.hash_state() for name, table in self.shard.sparse.tables.items()}

    def save(self, folder: Path) -> Path:
        """Save a checkpoint of trainer and shard."""
        self.trainer.save(str(folder))
        self.shard.save(str(folder))
        return folder

    def load(self, folder: Path, stage: str | None = None) -> None:
        self.trainer.load(str(folder), self.stages[stage] if stage else None)
        self.shard.load(str(folder))


def scores_of(beams: dict[str, Any], step: int = 0) -> dict[str, np.ndarray]:
    """Made-up scores of the ring's two rewards, without a flat group; [U, W] float32 each."""
    draw = np.random.default_rng(step)
    shape = beams["valid"].shape
    return {name: (draw.random(shape) * beams["valid"]).astype(np.float32) for name in ("hit", "own")}


def _without_time(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name not in MEASURED}
