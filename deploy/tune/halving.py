"""Synchronous successive halving: which trial runs next, as a pure function of the results so far.

All trials train a quarter of the stages' lengths. The better half of them (rounded up) trains anew with half, the better half of
those with all. Below 8 trials there are two rungs, below 4 one. A rung begins when the one before it is whole, so no decision
depends on who is fast; each rung costs about the same. A rung trains from the start, for a learning rate's decay is of the whole
length. After Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

ETA = 2
MOST_RUNGS = 3

Ask = Callable[[int, Sequence["Result"]], dict[str, Any]]  # (number, results told) -> values


@dataclass(frozen=True, slots=True)
class Job:
    """A trial on a rung."""

    number: int
    rung: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a job: its score, or why it has none."""

    number: int
    rung: int
    values: Mapping[str, Any]
    score: float | None
    failed: str | None = None
    minutes: float = 0.0


def shares(trials: int, lengths: Callable[[Fraction], object]) -> tuple[Fraction, ...]:
    """The rungs as shares of a stage's length, ascending; those that would train as long as the next are left out."""
    count = max(1, min(MOST_RUNGS, trials.bit_length() - 1))
    rungs = [Fraction(1, ETA**power) for power in reversed(range(count))]
    return tuple(
        share
        for share, longer in zip(rungs, [*rungs[1:], None], strict=True)
        if longer is None or lengths(share) != lengths(longer)
    )


@dataclass(frozen=True, slots=True)
class Halving:
    """trials: of the first rung; rungs: how many; lower: whether less is better; parallel: jobs at once; ask: new values."""

    trials: int
    rungs: int
    lower: bool
    parallel: int
    ask: Ask

    def sizes(self) -> list[int]:
        """Trials a rung, where none fails."""
        sizes = [self.trials]
        while len(sizes) < self.rungs:
            sizes.append(-(-sizes[-1] // ETA))
        return sizes

    def jobs(self, results: Sequence[Result]) -> list[Job]:
        """What may run now, in the order of numbers; none when all is done or a rung waits for what runs.

        Trials of the first rung are asked for `parallel` at a time: each knows all results of the batches before its own, told
        in the order of numbers.
        """
        first = sorted((each for each in results if each.rung == 0), key=lambda each: each.number)
        if len(first) < self.trials:
            done = {each.number for each in first}
            begin = next(number for number in range(self.trials) if number not in done)
            begin -= begin % self.parallel
            batch = range(begin, min(begin + self.parallel, self.trials))
            told = [each for each in first if each.number < begin]
            return [Job(number, 0, self.ask(number, told)) for number in batch if number not in done]
        for rung in range(1, self.rungs):
            chosen = self._best(results, rung - 1)
            done = {each.number for each in results if each.rung == rung}
            if waiting := [Job(each.number, rung, each.values) for each in chosen if each.number not in done]:
                return waiting
        return []

    def ranked(self, results: Sequence[Result], rung: int) -> list[Result]:
        """Those of a rung that have a score, best first; of equals the one with the lower number."""
        sign = 1.0 if self.lower else -1.0
        there = [each for each in results if each.rung == rung and each.score is not None]
        return sorted(there, key=lambda each: (sign * (each.score or 0.0), each.number))

    def winner(self, results: Sequence[Result]) -> Result | None:
        """The best of the longest rung that somebody came through; None where all failed."""
        for rung in reversed(range(self.rungs)):
            if ranked := self.ranked(results, rung):
                return ranked[0]
        return None

    def _best(self, results: Sequence[Result], rung: int) -> list[Result]:
        """Who goes on to the next rung, by number."""
        best = self.ranked(results, rung)[: self.sizes()[rung + 1]]
        return sorted(best, key=lambda each: each.number)
