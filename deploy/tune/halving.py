"""Synchronous successive halving: which trial runs next, as a pure function of the results so far.

All trials train for a quarter of the stages' lengths. The better half of them (rounded up) trains again for
half the lengths, and the better half of those for the whole lengths. With fewer than 8 trials there are two
rungs, with fewer than 4 one. A rung begins when the one before is complete, so no decision depends on
speed. All rungs cost about the same. Each rung trains from the start, because a learning rate's decay
depends on the whole length. After Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and
Hyperparameter Optimization", AISTATS 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

ETA = 2
MOST_RUNGS = 3

Ask = Callable[[int, Sequence["TrialResult"]], dict[str, Any]]  # (number, known results) -> values


@dataclass(frozen=True, slots=True)
class TrialJob:
    """A trial on a rung."""

    number: int
    rung: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a job.

    Attributes:
        number: The trial's number.
        rung: The rung, from 0.
        values: Values by key.
        score: The score; None if the job failed.
        failed: Why there is no score; None if there is one.
        minutes: Duration of the job.
    """

    number: int
    rung: int
    values: Mapping[str, Any]
    score: float | None
    failed: str | None = None
    minutes: float = 0.0


def compute_rung_shares(trials: int, lengths: Callable[[Fraction], object]) -> tuple[Fraction, ...]:
    """Compute the rungs as ascending shares of a stage's length.

    Args:
        trials: Number of trials on the first rung.
        lengths: Returns the stages' lengths for a share. Rungs with the same lengths as the next one are
            left out.
    """
    count = max(1, min(MOST_RUNGS, trials.bit_length() - 1))
    rungs = [Fraction(1, ETA**power) for power in reversed(range(count))]
    return tuple(
        share
        for share, longer in zip(rungs, [*rungs[1:], None], strict=True)
        if longer is None or lengths(share) != lengths(longer)
    )


@dataclass(frozen=True, slots=True)
class SuccessiveHalving:
    """The rules of a search.

    Attributes:
        trials: Number of trials on the first rung.
        rungs: Number of rungs.
        lower: Whether lower scores are better.
        parallel: Number of jobs at a time.
        ask: Proposes values for a trial's number, given results.
    """

    trials: int
    rungs: int
    lower: bool
    parallel: int
    ask: Ask

    def compute_sizes(self) -> list[int]:
        """Return the number of trials of each rung if none fails."""
        sizes = [self.trials]
        while len(sizes) < self.rungs:
            sizes.append(-(-sizes[-1] // ETA))
        return sizes

    def list_jobs(self, results: Sequence[TrialResult]) -> list[TrialJob]:
        """Return the jobs that may run now, in order of trial numbers.

        Trials of the first rung are proposed in batches of `parallel`: each one is based on all results of
        earlier batches, in order of trial numbers. The list is empty when the search has finished or a rung
        waits for running jobs.
        """
        first = sorted((each for each in results if each.rung == 0), key=lambda each: each.number)
        if len(first) < self.trials:
            done = {each.number for each in first}
            begin = next(number for number in range(self.trials) if number not in done)
            begin -= begin % self.parallel
            batch = range(begin, min(begin + self.parallel, self.trials))
            told = [each for each in first if each.number < begin]
            return [TrialJob(number, 0, self.ask(number, told)) for number in batch if number not in done]
        for rung in range(1, self.rungs):
            chosen = self._select_survivors(results, rung - 1)
            done = {each.number for each in results if each.rung == rung}
            if waiting := [
                TrialJob(each.number, rung, each.values) for each in chosen if each.number not in done
            ]:
                return waiting
        return []

    def rank_results(self, results: Sequence[TrialResult], rung: int) -> list[TrialResult]:
        """Return the results of a rung that have a score, best first; ties break by the lower number."""
        sign = 1.0 if self.lower else -1.0
        there = [each for each in results if each.rung == rung and each.score is not None]
        return sorted(there, key=lambda each: (sign * (each.score or 0.0), each.number))

    def find_winner(self, results: Sequence[TrialResult]) -> TrialResult | None:
        """Return the best result of the longest rung with scores; None if all trials failed."""
        for rung in reversed(range(self.rungs)):
            if ranked := self.rank_results(results, rung):
                return ranked[0]
        return None

    def _select_survivors(self, results: Sequence[TrialResult], rung: int) -> list[TrialResult]:
        """Return the results that are promoted to the next rung, in order of trial numbers."""
        best = self.rank_results(results, rung)[: self.compute_sizes()[rung + 1]]
        return sorted(best, key=lambda each: each.number)
