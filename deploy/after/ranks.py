"""The test events of a finished run, and the ranks that each stage and baseline gave to their items."""

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
    """A run with its test events.

    Attributes:
        run: The run's folder.
        metrics: Names of the scenario's metrics.
        stages: Names of the stages.
        seed: The run's seed.
        user: The user row of each event [P].
        events: (user id, item id or sparse key, unix seconds) of each event, the ids as text.
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
        seq = Sequences.load(Path(facts["artifacts"]["sequences"]["path"]))
        users, positions = sample_prompts(seq, TEST, scenario.evaluate.most_users, scenario.seed)
        event_indices = locate_events(seq, users, positions)
        item_indices = seq.item[event_indices]
        # Dense indices may differ between runs of the same data; keys do not.
        items = item_indices if seq.item_key is None else seq.item_key[item_indices]
        events = list(
            zip(
                map(str, seq.user_id[users].tolist()),
                map(str, items.tolist()),
                seq.time[event_indices].tolist(),
                strict=True,
            )
        )
        return cls(
            run, tuple(scenario.evaluate.metrics), tuple(scenario.stages), scenario.seed, users, events
        )

    def load_ranks(self, subject: str) -> np.ndarray:
        """Return the ranks [P] of a stage or baseline by exhaustive scoring. Raises ConfigError if it was not ranked."""
        path = self.run.results / f"{subject}.npz"
        if not path.exists():
            ranked = sorted(file.stem for file in self.run.results.glob("*.npz") if "." not in file.stem)
            raise ConfigError(
                f"{self.run.id} has no ranks of {subject!r}; it ranked {join_names(ranked)}.{suggest_sentence(subject, ranked)}"
            )
        return read_test_ranks(path)

    def find_last_stage(self) -> str:
        """Return the last stage of the run that was ranked. Raises ConfigError if there is none."""
        for stage in reversed(self.stages):
            if (self.run.results / f"{stage}.npz").exists():
                return stage
        raise ConfigError(f"{self.run.id} has not ranked a stage yet: resume it first")


def check_same_events(a: TestedRun, b: TestedRun) -> None:
    """Raise ConfigError unless two runs were tested on the same events."""
    if a.events == b.events:
        return
    common_count = len(set(a.events) & set(b.events))
    raise ConfigError(
        f"{a.run.id} and {b.run.id} were tested on different events: {len(a.events):,} and {len(b.events):,}, "
        f"{common_count:,} of them in common; compare runs with the same data, data.keep and data.split"
    )
