"""Fitting: creates, rehearses and fits the baselines of a run. Baselines that train for minutes are fitted one part at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from nonet.models.baselines import BASELINES, Baseline, make_baseline, rehearse
from nonet.samples.sequences import Sequences, Transitions


@dataclass(slots=True)
class _PartialFit:
    """A baseline that is fitted in parts.

    Attributes:
        baseline: The baseline.
        left: Iterator that fits one part per step.
        parts: Number of parts that were fitted.
    """

    baseline: Baseline
    left: Iterator[Any]
    parts: int = 0


class BaselineFitter:
    """Fits the baselines of a run.

    Args:
        configs: `use` and options by name of the baseline.
        seq: The sequences that baselines learn from.
        n_items: Number of items.
        seed: Seed of the run.
        history: Maximum number of events of a history.
        transitions: Opens the run's transitions.
    """

    def __init__(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        seq: Sequences,
        n_items: int,
        seed: int,
        history: int,
        transitions: Callable[[], Transitions],
    ):
        self._configs, self._seq, self._items = configs, seq, n_items
        self._seed, self._history = seed, history
        self._transitions = transitions
        self._begun: dict[str, _PartialFit] = {}

    def rehearse(self) -> None:
        """Run the user-defined baselines on a few events.

        Raises:
            DataError: A baseline returns scores that cannot be ranked.
        """
        for name, config in self._configs.items():
            if config["use"] not in BASELINES.list_shipped():
                rehearse(name, partial(self._make_baseline, name), self._seq, self._items)

    def fit_part(self, name: str) -> Baseline | int:
        """Return the fitted baseline, or the number of fitted parts if one part was fitted now and more may follow."""
        begun = self._begun.get(name)
        if begun is None:
            made = self._make_baseline(name)
            parts = getattr(made, "fit_in_parts", None)
            if parts is None:
                return made.fit(self._seq)
            begun = self._begun[name] = _PartialFit(made, iter(parts(self._seq)))
        for _ in begun.left:
            begun.parts += 1
            return begun.parts
        return self._begun.pop(name).baseline

    def _make_baseline(self, name: str) -> Baseline:
        """Create a baseline."""
        return make_baseline(
            self._configs[name],
            self._items,
            seed=self._seed,
            history=self._history,
            transitions=self._transitions,
        )
