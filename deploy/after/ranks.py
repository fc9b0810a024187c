"""The test events of a finished run, and what each stage and baseline predicted for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import refuse_damage
from nonet.controller.record import RunFolder
from nonet.controller.scenario import Scenario, flatten_document, read_document
from nonet.controller.setup import ReadingFacts
from nonet.errors import ConfigError
from nonet.plugins import load_heavy
from nonet.samples.sequences import Sequences
from nonet.suggest import join_names, suggest_sentence

# Shapes: P held-out test events.

# The keys of scenarios that decide which events are tested, as regular expressions.
_KEYS_OF_TESTED_EVENTS = re.compile(
    r"data\.(keep|split|where|repeats|unknown_items|labels|events|missing|columns)\b|stages\.\w+\.(target|tasks)\b"
)

_Event = tuple[str, str, int]
"""An event: its user id, item id or sparse key, and unix seconds, the ids as text."""


@dataclass(frozen=True, slots=True)
class TestedRun:
    """A run with its test events.

    Attributes:
        run: The run's folder.
        metrics: Names of the scenario's metrics.
        left_out: Those that code of the run computes, if it is not imported.
        stages: Names of the stages.
        seed: The run's seed.
        lower_is_better: Names of the metrics for which lower values are better.
        results: The reader of what was predicted for the events: a `RankResults`, or what the model's spec names.
        events: The test events.
        labels: The labelled test events and their labels, by task, "" for the target; empty if the model predicts none.
    """

    run: RunFolder
    metrics: tuple[str, ...]
    left_out: tuple[str, ...]
    stages: tuple[str, ...]
    seed: int
    lower_is_better: frozenset[str]
    results: Any
    events: list[_Event]
    labels: Mapping[str, list[tuple[_Event, bool]]]

    @classmethod
    def from_run(cls, run: RunFolder, scenario: Scenario | None = None) -> TestedRun:
        """Read the test events of a run.

        Args:
            run: The run.
            scenario: Its scenario, for metrics that code of the run computes; None to import no such code, and leave them out.

        Raises:
            ConfigError: The run has not prepared its data, or its results cannot be compared.
        """
        facts = run.read_facts()
        if facts is None:
            raise ConfigError(f"{run.id}: there is nothing to compare; it has not prepared its data yet")
        if scenario is not None:
            kinds, metrics, left_out = (
                ReadingFacts.from_scenario(scenario),
                tuple(scenario.evaluate.metrics),
                (),
            )
        else:
            kinds = ReadingFacts.from_run(run, facts)
            left_out = tuple(kinds.own_metrics)
            metrics = tuple(metric for metric in kinds.metrics if metric not in left_out)
        if limit := kinds.limits.get("report --compare"):
            raise ConfigError(f"report --compare: {run.id} {limit}")
        seq = Sequences.load(Path(run.fetch_artifacts(facts["artifacts"])["sequences"]))
        with refuse_damage(run.results / "tokenise.json"):
            results = load_heavy(kinds.results)(seq, kinds.target, kinds.most_users, kinds.seed)
        return cls(
            run,
            metrics,
            left_out,
            tuple(kinds.stages),
            kinds.seed,
            frozenset(kinds.lower_is_better),
            results,
            _list_events(seq, results.index, results.user),
            {
                task: list(zip(_list_events(seq, index, user), label.tolist(), strict=True))
                for task, (index, user, label) in results.labels_by_task.items()
            },
        )

    def load_results(self, subject: str, results: Any = None) -> np.ndarray:
        """Return what a stage or baseline predicted [P]: ranks, or probabilities.

        Args:
            subject: The stage or baseline.
            results: The reader; that of another run gives the array that its methods expect. None for that of this run.

        Raises:
            ConfigError: The subject was not evaluated, or its results are damaged.
        """
        path = self.run.results / f"{subject}.npz"
        if not path.is_file():
            evaluated = sorted(file.stem for file in self.run.results.glob("*.npz") if "." not in file.stem)
            raise ConfigError(
                f"{self.run.id} has no {self.results.noun} of {subject!r}; it has those of {join_names(evaluated)}."
                f"{suggest_sentence(subject, evaluated)}"
            )
        with refuse_damage(path):
            return (results or self.results).read(path)

    def find_last_stage(self) -> str:
        """Return the last stage of the run that was evaluated. Raises ConfigError if there is none."""
        for stage in reversed(self.stages):
            if (self.run.results / f"{stage}.npz").is_file():
                return stage
        raise ConfigError(f"{self.run.id} has not evaluated a stage yet: resume it first")


def _list_events(seq: Sequences, index: np.ndarray, user: np.ndarray) -> list[_Event]:
    """Return the events with these indices and user rows [P] as values that do not depend on the run."""
    item_indices = seq.item[index]
    # Dense indices may differ between runs of the same data; keys do not.
    items = item_indices if seq.item_key is None else seq.item_key[item_indices]
    return list(
        zip(
            map(str, seq.user_id[user].tolist()),
            map(str, items.tolist()),
            seq.time[index].tolist(),
            strict=True,
        )
    )


def check_same_events(a: TestedRun, b: TestedRun) -> None:
    """Raise ConfigError unless two runs were tested on the same events, with the same labels of the tasks that both have."""
    if a.events == b.events:
        for task in a.labels.keys() & b.labels.keys():
            if a.labels[task] != b.labels[task]:
                raise ConfigError(_describe_other_labels(a, b, task))
        return
    common_count = len(set(a.events) & set(b.events))
    raise ConfigError(
        f"{a.run.id} and {b.run.id} were tested on different events: {len(a.events):,} and {len(b.events):,}, "
        f"{common_count:,} of them in common; {_describe_other_data(a.run, b.run)}"
    )


def _describe_other_data(a: RunFolder, b: RunFolder) -> str:
    """Describe by which keys the data of two runs differ, and what to do."""
    values_by_key = [dict(flatten_document(read_document(run.scenario).document)) for run in (a, b)]
    differing = [
        f"{key} is {json.dumps(values_by_key[0].get(key))} in {a.id} and {json.dumps(values_by_key[1].get(key))} in {b.id}"
        for key in sorted(values_by_key[0].keys() | values_by_key[1].keys())
        if _KEYS_OF_TESTED_EVENTS.match(key) and values_by_key[0].get(key) != values_by_key[1].get(key)
    ]
    if not differing:
        return "their scenarios ask for the same, so their tables differ; compare runs with the same data"
    hidden = f", and {len(differing) - 3} keys more" if len(differing) > 3 else ""
    return f"{', and '.join(differing[:3])}{hidden}: run one of them again with the value of the other (--set KEY=VALUE)"


def _describe_other_labels(a: TestedRun, b: TestedRun, task: str) -> str:
    """Describe how the labels of a task differ between two runs, and what to do."""
    labels_a, labels_b = dict(a.labels[task]), dict(b.labels[task])
    common = labels_a.keys() & labels_b.keys()
    differing = sum(labels_a[event] != labels_b[event] for event in common)
    name = f"task {task}" if task else "target"
    return (
        f"{a.run.id} and {b.run.id} have other labels of the {name}: they differ for {differing:,} of {len(common):,} common "
        f"test events, and {len(labels_a.keys() ^ labels_b.keys()):,} events have a label in one of the runs alone; compare "
        f"runs with the same data.labels and the same condition of the {name}"
    )
