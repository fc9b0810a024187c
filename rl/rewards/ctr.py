"""The reward `ctr`: the click probability that a trained click model predicts for each beam.

    rewards: {click: {use: ctr, weight: 1.0, model: runs/<id>/checkpoints/step-000123}}

`model` is a checkpoint of a run of a click model, or the run's folder, whose newest checkpoint is used. A beam is scored given
its user's history. Only the labels of events that the click model was trained on are used, so no held-out label leaks. The
model gets no time for a beam; columns that it joins from stores, and neighbours in graphs, are as of the prompt's time. An item
that was not in its training data gets the mean rate of the label.
"""

# Shapes: U users, W beams, P beams with a known item, N events of all histories together.

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nonet.errors import ConfigError
from nonet.rl.rewards.api import Reward
from nonet.rl.rewards.known import locate_ids
from nonet.suggest import join_names, suggest_sentence
from nonet.trust import check_folder, guard_folder
from nonet.types import Jagged, Rollouts

_SHOWN_RUNS = 5  # in an error


class PredictedClick(Reward):
    """The reward whose scores are the click probabilities of a trained model.

    Args:
        model: Folder of a checkpoint, or of a run.
        task: The task whose probability is the reward; "" for the target of the model's stage.

    Raises:
        ConfigError: There is no such model, or its run has code that is not approved.
    """

    def __init__(self, model: str, task: str = ""):
        self.folder, self.task = _find_checkpoint(Path(model)), task
        run = self.folder.parents[1] if self.folder.parent.name == "checkpoints" else self.folder
        guard_folder(run)  # it may be that of somebody else
        check_folder(run, "model")

    def setup(self) -> None:
        """Load the click model: its weights, sparse rows and training data."""
        from nonet.models.clicks import ClickModel

        self.click_model = ClickModel(self.folder)
        self._column = self._find_column(self.click_model.setup.tasks)

    def _find_column(self, tasks: Sequence[str]) -> int:
        """Return the index of the task among those of the model. Raises ConfigError if the model does not have it."""
        if self.task not in tasks:
            _, *named = tasks
            known = f"its tasks are {join_names(named)}" if named else "it has no tasks"
            raise ConfigError(
                f"task: {self.task!r} is not predicted by the model in {self.folder}; {known}."
                f"{suggest_sentence(self.task, named)}"
            )
        return tasks.index(self.task)

    def score(self, r: Rollouts) -> Any:
        """Return the click probability of each beam, or the mean rate of the label for unknown items; [U, W] float32."""
        from nonet.models.clicks import ClickContexts

        known = self.click_model.known  # the training data
        item_UW = locate_ids(known.item_id, r.item_id)
        user_U = locate_ids(known.user_id, r.user_id)
        past_item_N = locate_ids(known.item_id, r.history.values)
        offsets = np.asarray(r.history.offsets, np.int64)
        label_N = known.label_of(np.repeat(user_U, np.diff(offsets)), past_item_N)
        score_UW = np.full(item_UW.shape, known.rates[self._column], np.float32)
        contexts = ClickContexts(
            user=user_U,
            user_id=r.user_id,
            past=Jagged(past_item_N, offsets),
            label=label_N,
            older=np.zeros(len(user_U), np.int64),
            time=np.full(len(user_U), int(time.time())) if r.time is None else r.time,
            since=np.zeros(len(user_U), np.int64),
            timeless=np.ones(len(user_U), bool),
            columns=known.get_columns(user_U),
        )
        row_P, beam_P = np.nonzero(item_UW >= 0)
        probability_PT = self.click_model.predict_pairs(contexts, row_P, item_UW[row_P, beam_P])
        score_UW[row_P, beam_P] = probability_PT[:, self._column]
        return score_UW


def _find_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint in the folder of a run, or the folder itself if it is a checkpoint.

    Raises:
        ConfigError: The folder does not exist, or has no click model.
    """
    if not folder.exists():
        models = folder.parent.glob("*/checkpoints/step-*/clicks/model.json")
        runs = sorted({model.parents[3] for model in models}, key=lambda run: run.stat().st_mtime)
        names = join_names(map(str, runs[-_SHOWN_RUNS:])) if runs else "none"
        raise ConfigError(
            f"there is no run {str(folder)!r}; the newest runs of click models in {folder.parent}: {names}"
        )
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    checkpoint = checkpoints[-1] if checkpoints else folder
    if not (checkpoint / "clicks" / "model.json").is_file():
        raise ConfigError(
            f"{folder} holds no click model; give a run of a click model (nonet run ctr), or a checkpoint of it, "
            "such as runs/<id>/checkpoints/step-000123"
        )
    return checkpoint
