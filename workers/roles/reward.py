"""RewardWorker: one reward, ours or the user's, in a process of its own.

It joins the columns that the reward asks for, of the items and out of stores (`data.join`) as of each prompt's time, so that
neither rollout nor controller knows them, and imports torch only if the reward does. A prompt whose score is NaN, of the wrong
shape, late or an exception has a row of NaN and is named by `troubles`; asked strictly, that is a DataError with the user ids.
Groups of prompts may be scored at once, so each call is known by a name and its troubles are asked for by that name. A reward
that is async or `concurrent` is called for several groups at once; any other for one after another.
"""

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
from nonet.models.generation import as_array
from nonet.rl import from_wire, join
from nonet.rl.rewards import PromptFailure, Reward, RewardCalls, RunData, await_result, load_reward, set_up
from nonet.samples.stores import JoinSetup, StoreJoins
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

_CALLS = 256  # calls whose troubles are kept


class RewardWorker(DistributeWorker):
    """One rank of a reward's group. `use`, `folder` and `options` are those of the scenario; `timeout_s`: of one call."""

    def __init__(
        self,
        name: str,
        use: Any,
        folder: str,
        options: Mapping[str, Any],
        joins: Sequence[JoinSetup] = (),
        timeout_s: float = 60.0,
    ):
        self.name, self._use, self._folder, self._options = name, use, folder, dict(options)
        self._columns: dict[str, np.ndarray] = {}
        self._joins, self._timeout_s = StoreJoins(joins), timeout_s
        self._run: RunData | None = None
        self._troubles: dict[str, list[PromptFailure]] = {}
        self._turn: AbstractContextManager[Any] = Lock()
        self._shared = Lock()  # of stores and troubles

    def setup(self) -> None:
        """Load the reward and let it set itself up."""
        self._attempts = RewardCalls(self._made, self.name, self._timeout_s)
        if self.reward.concurrent or inspect.iscoroutinefunction(self.reward.score):
            self._turn = nullcontext()

    def _made(self) -> Reward:
        reward = load_reward(self._use, Path(self._folder), self._options, name=self.name)
        reward.device, reward.timeout_s = self.device, self._timeout_s
        set_up(reward, self.name)
        if self._run is not None:
            await_result(reward.open(self._run))
        return reward

    @property
    def reward(self) -> Reward:
        """The reward as it is set up."""
        return self._attempts.reward

    @method(while_offloaded=True)
    def join_counts(self) -> dict[str, dict[str, float]]:
        """Return by join of `data.join` the rows that were looked up and found since the last call."""
        return self._joins.pop_counts()

    @method(folders=Replicate, remember=True)
    def open(self, folders: Mapping[str, str]) -> None:
        """Open the item columns that the reward asks for, and what it wants to know of the run."""
        run = RunData(folders)
        self._joined = [column for column in self.reward.columns if column in self._joins.names]
        for column in self.reward.columns:
            if column in self._joined:
                continue
            if column not in run.items.column_names:
                raise ConfigError(
                    f"reward {self.name!r} asks for the column {column!r}; items have "
                    f"{', '.join([*run.items.column_names, *self._joins.names])}"
                )
            self._columns[column] = as_array(run.items[column])
        await_result(self.reward.open(run))
        self._run = run

    @method(collect="concat", rollouts=Shard, idempotent=True, concurrent=True)
    def score(self, rollouts: Mapping[str, Any], strict: bool = False, call: str = "") -> np.ndarray:
        """Score Rollouts on the wire.

        Args:
            rollouts: This rank's share of the prompts.
            strict: Whether a prompt without a score raises DataError.
            call: Name by which `troubles` is asked about this call.

        Returns:
            Scores [U, W] float32, 0 where there is no beam, NaN in rows without a score.
        """
        beams = self._beams(rollouts)
        with self._turn:
            scores, troubles = self._attempts.score(beams)
        if strict and troubles:
            raise DataError(troubles[0].why)
        self._note(call, troubles)
        return scores

    @method(scores=Shard, idempotent=True)
    def troubles(self, scores: np.ndarray, call: str = "") -> list[PromptFailure]:
        """Return the rows of a call's scores that have none. `scores` are passed to wait for them."""
        return self._troubles.get(call, [])

    @method(idempotent=True)
    def hung(self) -> bool:
        """Return whether a call of the reward that was late may still run in this process."""
        return self._attempts.hung

    @method(collect="concat", rollouts=Replicate, rows=PerRank, idempotent=True)
    def score_again(
        self, rollouts: Mapping[str, Any], rows: Sequence[int], call: str = "", budget_s: float | None = None
    ) -> np.ndarray:
        """Score some rows of all rollouts once more, and find the prompts that are to blame.

        Args:
            rollouts: All prompts of the call that left rows without a score.
            rows: This rank's rows among them.
            call: Name by which `troubles` is asked about this call.
            budget_s: How long all attempts together may take.

        Returns:
            Scores [n, W] float32 of these rows, NaN without a score.
        """
        prompts = [self._beams(slice_rows(rollouts, row, row + 1)) for row in rows]
        with self._turn:
            scores, troubles = self._attempts.score_one_by_one(prompts, budget_s)
        self._note(call, troubles)
        return np.concatenate([np.zeros((0, rollouts["valid"].shape[1]), np.float32), *scores])

    def _note(self, call: str, troubles: list[PromptFailure]) -> None:
        """Keep the troubles of a call; those of old calls are forgotten."""
        with self._shared:
            self._troubles[call] = troubles
            while len(self._troubles) > _CALLS:
                self._troubles.pop(next(iter(self._troubles)))

    @method(collect="concat", scores=Shard, again=Replicate, rows=Replicate, idempotent=True)
    def patched(self, scores: np.ndarray, again: np.ndarray, rows: Sequence[int], total: int) -> np.ndarray:
        """Scores [U, W] with the rows that were asked again put in; `rows`: of all `total` prompts."""
        start, stop = split_evenly(total, self.world)[self.rank]
        out = np.array(scores)
        for row, values in zip(rows, again, strict=True):
            if start <= row < stop:
                out[row - start] = values
        return out

    @method(collect="concat", rollouts=Shard, idempotent=True)
    def nothing(self, rollouts: Mapping[str, Any], call: str = "") -> np.ndarray:
        """Return a row of NaN [U, W] for each prompt of a call that this rank did not answer."""
        beams = from_wire(rollouts)
        why = f"reward {self.name!r} did not answer and its process was ended"
        troubles = [
            PromptFailure(row, str(beams.uid[row]), str(beams.user_id[row]), why)
            for row in range(len(beams.uid))
        ]
        self._note(call, troubles)
        return np.full(beams.valid.shape, np.nan, np.float32)

    def _beams(self, rollouts: Mapping[str, Any]) -> Rollouts:
        """Rollouts with their columns."""
        beams = join(from_wire(rollouts), self._columns)
        if self._joined:
            asked = beams.item_id, beams.valid, beams.user_id, rollouts["time"]
            with self._shared:
                joined = self._joins.read_beam_columns(self._joined, *asked)
            beams = replace(beams, columns=beams.columns | joined)
        return beams

    @method(collect="concat", scores=Shard, idempotent=True)
    def means(self, scores: np.ndarray) -> np.ndarray:
        """The mean [U] of each prompt's scores [U, W]; NaN without a score."""
        return np.asarray(scores, np.float64).mean(1)
