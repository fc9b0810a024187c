"""BaselineFitter: creates, tests and fits the baselines of a run. Baselines that train for minutes are fitted part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from nonet.models.baselines import rehearse
from nonet.models.baselines.kinds import BASELINES, Baseline, make_baseline
from nonet.samples.sequences import Sequences, Transitions


@dataclass(slots=True)
class _PartialFit:
    """A baseline that is fitted in parts.

    Attributes:
        baseline: The baseline.
        remaining_parts: Iterator that fits one part per step.
        fitted_parts: Number of parts that were fitted.
    """

    baseline: Baseline
    remaining_parts: Iterator[Any]
    fitted_parts: int = 0


class BaselineFitter:
    """Fits the baselines of a run.

    Args:
        configs: `use` and options by name of the baseline.
        seq: The sequences that baselines learn from.
        n_items: Number of items.
        seed: Seed of the run.
        history: Maximum number of events of a history.
        transitions: Opens the run's transitions.
        items: The item table.
    """

    def __init__(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        seq: Sequences,
        n_items: int,
        seed: int,
        history: int,
        transitions: Callable[[], Transitions],
        items: pa.Table,
    ):
        self._configs, self._seq, self._n_items = configs, seq, n_items
        self._seed, self._history = seed, history
        self._transitions, self._items = transitions, items
        self._partial_fits: dict[str, _PartialFit] = {}  # By name of the baseline.

    def rehearse(self) -> None:
        """Check that baselines fit the items, and run the user-defined ones on a few events, to find errors before training.

        Raises:
            ConfigError: A baseline needs a library that is not installed.
            DataError: A baseline does not fit the items, or returns scores that cannot be ranked.
        """
        for name, config in self._configs.items():
            BASELINES.get(config["use"]).check_items(self._items, config)
            if config["use"] not in BASELINES.list_shipped():
                rehearse(name, partial(self._make_baseline, name), self._seq, self._n_items)

    def fit_part(self, name: str) -> Baseline | int:
        """Return the fitted baseline, or the number of fitted parts if one part was fitted now and more may follow."""
        partial_fit = self._partial_fits.get(name)
        if partial_fit is None:
            baseline = self._make_baseline(name)
            fit_in_parts = getattr(baseline, "fit_in_parts", None)
            if fit_in_parts is None:
                return baseline.fit(self._seq)
            partial_fit = self._partial_fits[name] = _PartialFit(baseline, iter(fit_in_parts(self._seq)))
        for _ in partial_fit.remaining_parts:  # The first iteration fits one part.
            partial_fit.fitted_parts += 1
            return partial_fit.fitted_parts
        return self._partial_fits.pop(name).baseline

    def _make_baseline(self, name: str) -> Baseline:
        """Create a baseline from its options."""
        return make_baseline(
            self._configs[name],
            self._n_items,
            seed=self._seed,
            history=self._history,
            transitions=self._transitions,
            item_table=lambda: self._items,
        )
