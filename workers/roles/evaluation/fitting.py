"""Fitting: the run's baselines, made, rehearsed and fitted; those that train for minutes a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from nonet.models.baselines import BASELINES, Baseline, make_baseline, rehearse
from nonet.samples.sequences import Sequences, Transitions


@dataclass(slots=True)
class _Begun:
    """A baseline that is fitted in parts: those left, and how many are done."""

    baseline: Baseline
    left: Iterator[Any]
    parts: int = 0


class Fitting:
    """configs: baselines by name, `use` and options; seq: the events they learn from; transitions: gives the run's."""

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
        self._begun: dict[str, _Begun] = {}

    def rehearse(self) -> None:
        """Raises DataError, one line, where a baseline of the user's own answers what nobody can rank."""
        for name, config in self._configs.items():
            if config["use"] not in BASELINES.list_shipped():
                rehearse(name, partial(self._made, name), self._seq, self._items)

    def fitted(self, name: str) -> Baseline | int:
        """The fitted baseline; where one part was fitted and there may be more, how many were so far."""
        begun = self._begun.get(name)
        if begun is None:
            made = self._made(name)
            parts = getattr(made, "fit_in_parts", None)
            if parts is None:
                return made.fit(self._seq)
            begun = self._begun[name] = _Begun(made, iter(parts(self._seq)))
        for _ in begun.left:
            begun.parts += 1
            return begun.parts
        return self._begun.pop(name).baseline

    def _made(self, name: str) -> Baseline:
        return make_baseline(
            self._configs[name],
            self._items,
            seed=self._seed,
            history=self._history,
            transitions=self._transitions,
        )
