"""Synchronous successive halving: it decides which trial runs next, by the results so far only.

All trials train for a quarter of the stages' lengths: the first rung. The better half of them (rounded up) trains
again for half the lengths, and the better half of those for the whole lengths. With fewer than 8 trials there are two
rungs, with fewer than 4 one. A rung begins when the one before is complete, so no decision depends on
speed. All rungs cost about the same. Each rung trains from the start, because a learning rate's decay
depends on the whole length. The method is from Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and
Hyperparameter Optimization", AISTATS 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

ETA = 2  # one of `ETA` trials is promoted to the next rung, which trains for `ETA` times the length
MOST_RUNGS = 3

# Proposes the values of a trial from its number and the results that may be known: values by key.
ProposeValues = Callable[[int, Sequence["TrialResult"]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TrialJob:
    """A trial on a rung, to be run.

    Attributes:
        number: The trial's number.
        rung: The rung, from 0.
        values: Values by key.
    """

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
        minutes: The job's duration.
    """

    number: int
    rung: int
    values: Mapping[str, Any]
    score: float | None
    failed: str | None = None
    minutes: float = 0.0


def compute_rung_shares(trials: int, lengths: Callable[[Fraction], object]) -> tuple[Fraction, ...]:
    """Compute the share of the stages' lengths that each rung trains, ascending to 1.

    Args:
        trials: Number of trials on the first rung.
        lengths: Returns the stages' lengths for a share. Rungs with the same lengths as the next one, because
            of rounding, are left out.
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
    """The rules by which a search chooses its jobs and its winner.

    Attributes:
        trials: Number of trials on the first rung.
        rungs: Number of rungs.
        lower: Whether lower scores are better.
        parallel: Number of jobs at a time.
        propose: Proposes values for a trial's number, given results.
    """

    trials: int
    rungs: int
    lower: bool
    parallel: int
    propose: ProposeValues

    def compute_sizes(self) -> list[int]:
        """Return the number of trials of each rung if none fails."""
        sizes = [self.trials]
        while len(sizes) < self.rungs:
            sizes.append(-(-sizes[-1] // ETA))
        return sizes

    def list_jobs(self, results: Sequence[TrialResult]) -> list[TrialJob]:
        """Return the jobs without a result that may run now, including running ones, in order of trial numbers.

        Trials of the first rung are proposed in batches of `parallel`: each one is based on all results of
        earlier batches, in order of trial numbers. The list is empty when the search has finished.
        """
        first_results = sorted(
            (result for result in results if result.rung == 0), key=lambda result: result.number
        )
        if len(first_results) < self.trials:
            done_numbers = {result.number for result in first_results}
            first_open = next(number for number in range(self.trials) if number not in done_numbers)
            batch_start = first_open - first_open % self.parallel
            batch = range(batch_start, min(batch_start + self.parallel, self.trials))
            known_results = [result for result in first_results if result.number < batch_start]
            return [
                TrialJob(number, rung=0, values=self.propose(number, known_results))
                for number in batch
                if number not in done_numbers
            ]
        for rung in range(1, self.rungs):
            survivors = self._select_survivors(results, rung - 1)
            done_numbers = {result.number for result in results if result.rung == rung}
            jobs = [
                TrialJob(survivor.number, rung, survivor.values)
                for survivor in survivors
                if survivor.number not in done_numbers
            ]
            if jobs:
                return jobs
        return []

    def rank_results(self, results: Sequence[TrialResult], rung: int) -> list[TrialResult]:
        """Return the results of a rung that have a score, best first; ties break by the lower number."""
        sign = 1.0 if self.lower else -1.0
        scored = [result for result in results if result.rung == rung and result.score is not None]
        return sorted(scored, key=lambda result: (sign * (result.score or 0.0), result.number))

    def find_winner(self, results: Sequence[TrialResult]) -> TrialResult | None:
        """Return the best result of the longest rung with scores; None if all trials failed."""
        for rung in reversed(range(self.rungs)):
            if ranked := self.rank_results(results, rung):
                return ranked[0]
        return None

    def _select_survivors(self, results: Sequence[TrialResult], rung: int) -> list[TrialResult]:
        """Return the results of a rung that are promoted to the next one, in order of trial numbers."""
        best = self.rank_results(results, rung)[: self.compute_sizes()[rung + 1]]
        return sorted(best, key=lambda result: result.number)
