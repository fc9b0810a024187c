"""RewardWorker: one reward, ours or the user's, in a process of its own.

It joins the columns that the reward asks for, of the items and out of stores (`data.join`) as of each prompt's time, so that
neither rollout nor controller knows them, and imports torch only if the reward does. A score that is NaN, of the wrong
shape, or an exception is a DataError with the user ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nonet.errors import ConfigError
from nonet.models.generation import as_array, read_items
from nonet.rl import from_wire, join
from nonet.rl.rewards import load_reward, score_checked, set_up
from nonet.samples.stores import Joins, JoinSetup
from nonet.workers.runtime import DistributeWorker, Replicate, Shard, method


class RewardWorker(DistributeWorker):
    """One rank of a reward's group. `use`, `folder` and `options` are those of the scenario."""

    def __init__(
        self, name: str, use: Any, folder: str, options: Mapping[str, Any], joins: Sequence[JoinSetup] = ()
    ):
        self.name, self._use, self._folder, self._options = name, use, folder, dict(options)
        self._columns: dict[str, np.ndarray] = {}
        self._joins = Joins(joins)

    def setup(self) -> None:
        """Load the reward and let it set itself up."""
        self.reward = load_reward(self._use, Path(self._folder), self._options, name=self.name)
        self.reward.device = self.device
        set_up(self.reward, self.name)

    @method(folders=Replicate, remember=True)
    def open(self, folders: Mapping[str, str]) -> None:
        """Open the item columns that the reward asks for."""
        table = read_items(folders)
        self._joined = [column for column in self.reward.columns if column in self._joins.names]
        for column in self.reward.columns:
            if column in self._joined:
                continue
            if column not in table.column_names:
                raise ConfigError(
                    f"reward {self.name!r} asks for the column {column!r}; items have "
                    f"{', '.join([*table.column_names, *self._joins.names])}"
                )
            self._columns[column] = as_array(table[column])

    @method(collect="concat", rollouts=Shard, idempotent=True)
    def score(self, rollouts: Mapping[str, Any]) -> np.ndarray:
        """Scores [U, W] float32 of Rollouts on the wire, 0 where there is no beam."""
        beams = join(from_wire(rollouts), self._columns)
        if self._joined:
            asked = beams.item_id, beams.valid, beams.user_id, rollouts["time"]
            beams = replace(beams, columns=beams.columns | self._joins.beam_columns(self._joined, *asked))
        return score_checked(self.reward, self.name, beams)

    @method(collect="concat", scores=Shard, idempotent=True)
    def means(self, scores: np.ndarray) -> np.ndarray:
        """The mean [U] of each prompt's scores [U, W]."""
        return np.asarray(scores, np.float64).mean(1)
