"""Ranks of a finished run: its test events, and how each subject ranked their items."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nonet.controller.record import RunFolder
from nonet.controller.scenario import load_scenario
from nonet.errors import ConfigError
from nonet.models.ranking import read_test_ranks
from nonet.samples.batches import locate_events, sample_prompts
from nonet.samples.sequences import TEST, Sequences
from nonet.suggest import join_names, suggest_sentence

# Shapes: P held-out test events.


@dataclass(frozen=True, slots=True)
class TestedRun:
    """A run's test events.

    Attributes:
        run: The run's folder.
        metrics: Names of the scenario's metrics.
        stages: Names of the stages.
        seed: The run's seed.
        user: The user row of each event [P].
        events: (user, item, time) of each event, with the ids of the data.
    """

    run: RunFolder
    metrics: tuple[str, ...]
    stages: tuple[str, ...]
    seed: int
    user: np.ndarray
    events: list[tuple[str, str, int]]

    @classmethod
    def from_run(cls, run: RunFolder) -> TestedRun:
        """Read the test events of a run. Raises ConfigError for a run that ranks no items or has not tokenised its data."""
        facts = run.read_facts()
        if facts is None or "sids" not in facts["artifacts"]:
            raise ConfigError(
                f"{run.id}: there is nothing to compare; it ranks no items or has not tokenised its data"
            )
        scenario, _ = load_scenario(run.scenario)
        folder = Path(facts["artifacts"]["sequences"]["path"])
        seq = Sequences.load(folder)
        users, positions = sample_prompts(seq, TEST, scenario.evaluate.most_users, scenario.seed)
        at = locate_events(seq, users, positions)
        items = seq.item[at] if seq.item_key is None else seq.item_key[seq.item[at]]
        events = list(
            zip(
                map(str, seq.user_id[users].tolist()),
                map(str, items.tolist()),
                seq.time[at].tolist(),
                strict=True,
            )
        )
        return cls(
            run, tuple(scenario.evaluate.metrics), tuple(scenario.stages), scenario.seed, users, events
        )

    def load_ranks(self, subject: str) -> np.ndarray:
        """Return the ranks [P] of a stage or baseline by exhaustive scoring. Raises ConfigError if it was not ranked."""
        path = self.run.results / f"{subject}.npz"
        there = sorted(file.stem for file in self.run.results.glob("*.npz") if "." not in file.stem)
        if not path.exists():
            raise ConfigError(
                f"{self.run.id} has no ranks of {subject!r}; it ranked {join_names(there)}.{suggest_sentence(subject, there)}"
            )
        return read_test_ranks(path)

    def find_last_stage(self) -> str:
        """Return the newest stage that was ranked. Raises ConfigError if there is none."""
        for stage in reversed(self.stages):
            if (self.run.results / f"{stage}.npz").exists():
                return stage
        raise ConfigError(f"{self.run.id} has not ranked a stage yet: resume it first")


def check_same_events(a: TestedRun, b: TestedRun) -> None:
    """Raise ConfigError unless two runs were tested on the same events."""
    if a.events == b.events:
        return
    both = len(set(a.events) & set(b.events))
    raise ConfigError(
        f"{a.run.id} and {b.run.id} were tested on different events: {len(a.events):,} and {len(b.events):,}, {both:,} of them "
        "in common; compare runs with the same data, data.keep and data.split"
    )
