"""The cost of a memory: the same steps of the quickstart with its memory, without signals, and without a memory, in turn."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from nonet.bench.timing import measure_milliseconds

_SCENARIO, _WIDTH, _USERS = "quickstart", 16, 64


def bench_memory(rounds: int = 7, warm: int = 20) -> dict[str, Any]:
    """Time the steps of all sides, in one thread.

    Args:
        rounds: Timed rounds.
        warm: Steps that all sides train first, so that beams are those of a trained model.

    Returns:
        Milliseconds of a supervised step, a rollout of 64 users x 16 beams, an RL update of it, and exhaustive scores
        of 256 prompts; and their ratios to those without a memory.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            facts = _tokenise_data(Path(folder))
            sides = {how: _MemorySide(facts, changes, warm) for how, changes in _SIDES.items()}
            calls = {
                f"{what} {how}": getattr(side, name)
                for what, name in _CALLS.items()
                for how, side in sides.items()
            }
            taken = measure_milliseconds(calls, rounds)
    finally:
        torch.set_num_threads(threads)
    ratio = {
        f"{what} {how}": taken[f"{what} {how} CPU"] / taken[f"{what} off CPU"]
        for what in _CALLS
        for how in _SIDES
        if how != "off"
    }
    return {"rows": [taken], "ratio": ratio}


# Changes of the scenario by side.
_SIDES = {"off": ["model.memory=off"], "on": [], "no signals": ["model.memory.signals=[]"]}
_CALLS = {
    "supervised step": "step",
    "rollout": "roll_out",
    "update": "update",
    "exhaustive": "score",
}


def _tokenise_data(folder: Path) -> dict[str, str]:
    """Prepare the data of the scenario, and return the folders of the artifacts."""
    from nonet.controller.scenario import load_scenario
    from nonet.controller.setup import make_data_setup
    from nonet.workers.roles.artifacts import Tokeniser

    scenario, beside = load_scenario(_SCENARIO)
    facts: dict[str, Any] = Tokeniser().prepare(make_data_setup(scenario, beside), str(folder))
    return {kind: artifact["path"] for kind, artifact in facts["artifacts"].items()}


class _MemorySide:
    """Trainer, shard and rollout in this process, with a changed scenario."""

    def __init__(self, artifact_dirs: dict[str, str], changes: list[str], warm: int):
        from nonet.controller.scenario import load_scenario
        from nonet.controller.setup import make_run_setup, make_stage_setups
        from nonet.samples.batches import list_prompts
        from nonet.samples.sequences import TEST
        from nonet.workers.roles import EmbeddingShard, Rollout, Trainer
        from nonet.workers.runtime import Place

        scenario, _ = load_scenario(_SCENARIO, changes)
        run = make_run_setup(scenario)
        shard, self._trainer, self._rollout = EmbeddingShard(run), Trainer(run), Rollout(run)
        self._trainer.place = Place(role="trainer", peers={"embedding": shard})
        self._rollout.place = Place(role="rollout", peers={"trainer": self._trainer, "embedding": shard})
        self._trainer.open(artifact_dirs)
        self._rollout.open(artifact_dirs)
        seq = self._trainer.corpus.seq
        self._stages = make_stage_setups(scenario, len(seq), int(seq.count_events()["train"]))
        self._current, self._at, self._updates = "", 0, 0
        for _ in range(warm):
            self.step()
        self._version = 0
        users, positions = list_prompts(seq, TEST)
        self._asked = users[:256], positions[:256]
        self._beams = self.roll_out()
        self._scores = {
            name: np.random.default_rng(0).random(self._beams["valid"].shape).astype(np.float32)
            for name in self._stages["rl"].weights
        }

    def _enter(self, name: str) -> Any:
        """Begin a stage unless it is the current one, and return its settings."""
        if self._current != name:
            self._current = name
            self._trainer.begin(self._stages[name])
        return self._stages[name]

    def step(self) -> None:
        """Run a supervised step."""
        if self._at % self._stages["pretrain"].steps == 0:
            self._current = ""  # so that an epoch begins again
        stage = self._enter("pretrain")
        self._trainer.train(stage, self._at % stage.steps, self._at % stage.steps + 1)
        self._at += 1

    def roll_out(self) -> dict[str, Any]:
        """Generate a rollout."""
        from nonet.workers.roles import RolloutRequest

        self._version += 1
        self._rollout.apply(self._version)
        users, positions = self._rollout.lease("rl", 0, _USERS)
        return self._rollout.generate(users, positions, RolloutRequest("rl", 0, _WIDTH, self._version))

    def update(self) -> None:
        """Run an RL update."""
        from nonet.workers.roles import UpdateRequest

        names = ("sid", "valid", "logp", "user", "position")
        beams = {name: self._beams[name] for name in names}
        self._updates += 1
        self._trainer.update(UpdateRequest(self._enter("rl"), self._updates), beams, self._scores)

    def score(self) -> None:
        """Score prompts exhaustively."""
        recommender = self._rollout._recommender
        recommender.score_catalogue(recommender.batch(*self._asked), *self._asked)
