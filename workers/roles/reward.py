"""RewardWorker: runs one reward, shipped or user-defined, in a process of its own.

The worker joins the columns that the reward needs, from the item table and from stores (`data.join`) as of each prompt's time, so
that neither rollout nor controller has to know them. It imports torch only if the reward does. A prompt whose scores are NaN or
have the wrong shape, or whose call was late or raised an exception, gets a row of NaN and is listed by `list_failures`; with
`strict` the call raises DataError with the user ids instead. Several groups of prompts may be scored at once, so every call has a
name, under which `list_failures` finds its failures. A reward that is async or `concurrent` is called for several groups at once;
any other reward is called for one group after another.
"""

# Shapes: U prompts, W beams per prompt, n prompts that are scored again.

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from nonet.errors import ConfigError, DataError
from nonet.rl import from_wire, join
from nonet.rl.rewards import (
    PromptFailure,
    Reward,
    RewardCalls,
    RunData,
    describe_missing_column,
    load_reward,
    open_reward,
    set_up,
)
from nonet.samples.stores import Join, StoreJoins
from nonet.samples.tokenised import as_array
from nonet.types import Rollouts
from nonet.workers.runtime import (
    DistributeWorker,
    PerRank,
    Replicate,
    Shard,
    method,
    slice_rows,
    split_evenly,
)

_MAX_RECORDED_CALLS = 256  # Number of calls whose failures are stored; those of older calls are discarded.


class RewardWorker(DistributeWorker):
    """One rank of a reward's group.

    Args:
        name: Name of the reward in the scenario.
        use: The reward, as the scenario names it: a name, a file path or a dotted path.
        folder: Folder of the scenario, to which paths are relative.
        options: Options of the reward in the scenario.
        joins: Stores whose columns are joined to the rollouts, by name.
        timeout_s: Time limit of one call of the reward in seconds.
    """

    def __init__(
        self,
        name: str,
        use: Any,
        folder: str,
        options: Mapping[str, Any],
        joins: Mapping[str, Join] | None = None,
        timeout_s: float = 60.0,
    ):
        self.name, self._use, self._folder, self._options = name, use, folder, dict(options)
        self._columns: dict[str, np.ndarray] = {}  # Columns of the item table that the reward needs.
        self._joins, self._timeout_s = StoreJoins(joins or {}), timeout_s
        self._run: RunData | None = None
        self._failures_by_call: dict[str, list[PromptFailure]] = {}
        self._scoring_lock: AbstractContextManager[Any] = Lock()
        self._state_lock = Lock()  # Guards `_joins` and `_failures_by_call`.

    def setup(self) -> None:
        """Load the reward and call its `setup`."""
        self._reward_calls = RewardCalls(self._make_reward, self.name, self._timeout_s)
        if self.reward.concurrent or inspect.iscoroutinefunction(self.reward.score):
            self._scoring_lock = nullcontext()

    def _make_reward(self) -> Reward:
        """Load the reward, set it up, and open it if the run's data are known."""
        reward = load_reward(self._use, Path(self._folder), self._options, name=self.name)
        reward.device, reward.timeout_s = self.device, self._timeout_s
        set_up(reward, self.name)
        if self._run is not None:
            open_reward(reward, self.name, self._run)
        return reward

    @property
    def reward(self) -> Reward:
        """The reward, after its setup."""
        return self._reward_calls.reward

    @method(while_offloaded=True)
    def join_counts(self) -> dict[str, dict[str, float]]:
        """Return how many rows were looked up and found since the last call, for each join in `data.join`."""
        with self._state_lock:
            return self._joins.pop_counts()

    @method(folders=Replicate, remember=True)
    def open(self, folders: Mapping[str, str]) -> None:
        """Load the item columns that the reward needs, and call its `open` with the run's data."""
        run = RunData(folders)
        self._store_columns = [column for column in self.reward.columns if column in self._joins.names]
        for column in self.reward.columns:
            if column in self._store_columns:
                continue
            if column not in run.items.column_names:
                known = [*run.items.column_names, *self._joins.names]
                raise ConfigError(describe_missing_column(self.name, column, known))
            self._columns[column] = as_array(run.items[column])
        open_reward(self.reward, self.name, run)
        self._run = run

    @method(collect="concat", rollouts=Shard, idempotent=True, concurrent=True)
    def score(self, rollouts: Mapping[str, Any], strict: bool = False, call: str = "") -> np.ndarray:
        """Score rollouts.

        Args:
            rollouts: This rank's share of the prompts, as encoded by `to_wire`.
            strict: Whether a prompt without a score raises DataError.
            call: Name of this call for `list_failures`.

        Returns:
            Scores [U, W] float32; 0 where there is no beam, NaN in rows without a score.
        """
        beams = self._join_columns(rollouts)
        with self._scoring_lock:
            scores, failures = self._reward_calls.score(beams)
        if strict and failures:
            raise DataError(failures[0].why)
        self._record_failures(call, failures)
        return scores

    @method(scores=Shard, idempotent=True)
    def list_failures(self, scores: np.ndarray, call: str = "") -> list[PromptFailure]:
        """Return the failures of a call, one per row without a score. `scores` is unused; it makes Ray wait for the call."""
        return self._failures_by_call.get(call, [])

    @method(idempotent=True)
    def is_hung(self) -> bool:
        """Return whether a call of the reward that exceeded its time limit may still run in this process."""
        return self._reward_calls.hung

    @method(collect="concat", rollouts=Replicate, rows=PerRank, idempotent=True)
    def score_again(
        self, rollouts: Mapping[str, Any], rows: Sequence[int], call: str = "", budget_s: float | None = None
    ) -> np.ndarray:
        """Score some of the prompts again, one at a time, so that only those that really fail stay without a score.

        Args:
            rollouts: All prompts of the first call, as encoded by `to_wire`.
            rows: Row numbers among them that this rank scores again.
            call: Name of the call for `list_failures`.
            budget_s: Time limit of all attempts together in seconds; None for none.

        Returns:
            Scores [n, W] float32 of these rows, NaN without a score.
        """
        prompts = [self._join_columns(slice_rows(rollouts, row, row + 1)) for row in rows]
        with self._scoring_lock:
            scores, failures = self._reward_calls.score_one_by_one(prompts, budget_s)
        self._record_failures(call, failures)
        return np.concatenate([np.zeros((0, rollouts["valid"].shape[1]), np.float32), *scores])

    def _record_failures(self, call: str, failures: list[PromptFailure]) -> None:
        """Store the failures of a call and discard those of old calls."""
        with self._state_lock:
            self._failures_by_call[call] = failures
            while len(self._failures_by_call) > _MAX_RECORDED_CALLS:
                self._failures_by_call.pop(next(iter(self._failures_by_call)))

    @method(collect="concat", scores=Shard, again=Replicate, rows=Replicate, idempotent=True)
    def patch_scores(
        self, scores: np.ndarray, again: np.ndarray, rows: Sequence[int], total: int
    ) -> np.ndarray:
        """Replace the scores of this rank's rows that were scored again.

        Args:
            scores: Scores [U, W] of this rank.
            again: Scores [n, W] of the rows that were scored again.
            rows: Their row numbers among all prompts.
            total: Number of all prompts.

        Returns:
            The scores [U, W] of this rank with the replaced rows.
        """
        start, stop = split_evenly(total, self.world)[self.rank]
        patched_UW = np.array(scores)
        for row, score_W in zip(rows, again, strict=True):
            if start <= row < stop:
                patched_UW[row - start] = score_W
        return patched_UW

    @method(collect="concat", rollouts=Shard, idempotent=True)
    def make_blank_scores(self, rollouts: Mapping[str, Any], call: str = "") -> np.ndarray:
        """Return NaN scores [U, W] for a share whose rank did not answer, and record a failure for each prompt."""
        beams = from_wire(rollouts)
        why = f"reward {self.name!r} did not answer, and its process was stopped"
        failures = [
            PromptFailure(row, str(beams.uid[row]), str(beams.user_id[row]), why)
            for row in range(len(beams.uid))
        ]
        self._record_failures(call, failures)
        return np.full(beams.valid.shape, np.nan, np.float32)

    def _join_columns(self, rollouts: Mapping[str, Any]) -> Rollouts:
        """Decode rollouts and join the columns that the reward needs."""
        beams = join(from_wire(rollouts), self._columns)
        if self._store_columns:
            with self._state_lock:
                store_values = self._joins.read_beam_columns(
                    self._store_columns, beams.item_id, beams.valid, beams.user_id, rollouts["time"]
                )
            beams = replace(beams, columns=beams.columns | store_values)
        return beams

    @method(collect="concat", scores=Shard, idempotent=True)
    def compute_means(self, scores: np.ndarray) -> np.ndarray:
        """Compute the mean score [U] of each prompt from scores [U, W]; NaN without a score."""
        return np.asarray(scores, np.float64).mean(1)
