"""The reward `ctr`: the click probability that a trained click model predicts for each beam.

    rewards: {click: {use: ctr, weight: 1.0, model: runs/<id>/checkpoints/step-000123}}

`model` is a checkpoint of a run of a click model, or the run's folder, whose newest checkpoint is used. A beam is scored given
its user's history. Only the labels of events that the click model was trained on are used, so no held-out label leaks. The
model gets no time for a beam. An item that was not in its training data gets the mean click rate.
"""

# Shapes: U users, W beams, P = U * W questions, I items.

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nonet.errors import ConfigError
from nonet.rl.rewards.api import Reward
from nonet.rl.rewards.known import locate_ids
from nonet.types import Jagged, Rollouts

_CHUNK = 8192


class PredictedClick(Reward):
    """The reward whose scores are the click probabilities of a trained model.

    Args:
        model: Folder of a checkpoint, or of a run.
    """

    def __init__(self, model: str):
        self.folder = _commit(Path(model))

    def setup(self) -> None:
        """Load the click model: its weights, sparse rows and training data."""
        from nonet.models.deepfm import ClickModel

        self.asked = ClickModel(self.folder)

    def score(self, r: Rollouts) -> Any:
        """Return the click probability of each beam, or the mean click rate for unknown items; [U, W] float32."""
        known = self.asked.known
        item_UW = locate_ids(known.item_id, r.item_id)
        user_U = locate_ids(known.user_id, r.user_id)
        past = locate_ids(known.item_id, r.history.values)
        offsets = np.asarray(r.history.offsets, np.int64)
        label = known.label_of(np.repeat(user_U, np.diff(offsets)), past)
        score_UW = np.full(item_UW.shape, known.rate, np.float32)
        u, w = np.nonzero(item_UW >= 0)
        for start in range(0, len(u), _CHUNK):
            part = slice(start, start + _CHUNK)
            score_UW[u[part], w[part]] = self._predict(
                user_U, u[part], item_UW[u[part], w[part]], past, offsets, label
            )
        return score_UW

    def _predict(
        self,
        user_U: np.ndarray,
        row: np.ndarray,
        item: np.ndarray,
        past: np.ndarray,
        offsets: np.ndarray,
        label: np.ndarray,
    ) -> np.ndarray:
        """Predict the probabilities of (user, item) pairs given the users' past events."""
        from nonet.models.deepfm import get_missing_value
        from nonet.ranges import expand_ranges
        from nonet.samples.batches import ClickQuestions, make_bags, select_values

        setup, known = self.asked.setup, self.asked.known
        begin, end = offsets[row], offsets[row + 1]
        last, cuts = expand_ranges(np.maximum(begin, end - setup.history), end)
        nothing, user = np.zeros(len(row), np.int64), user_U[row]
        columns = {
            name: np.where(user >= 0, values[np.maximum(user, 0)], get_missing_value(values))
            for name, values in known.columns.items()
        }
        questions = ClickQuestions(
            user=user,
            item=item,
            liked=select_values(past[last], cuts, label[last] == 1),
            disliked=select_values(past[last], cuts, label[last] == 0),
            activity=end - begin,
            time=nothing,
            since=nothing,
            timeless=np.ones(len(row), bool),
            columns=columns,
        )
        bags: dict[str, Jagged] = make_bags(
            questions, self.asked.items, tuple(setup.features), self.asked.keys
        )
        return self.asked.predict(bags)


def _commit(folder: Path) -> Path:
    """Return the newest checkpoint in the folder of a run, or the folder itself if it is a checkpoint.

    Raises:
        ConfigError: The folder has no click model.
    """
    commits = sorted((folder / "checkpoints").glob("step-*"))
    commit = commits[-1] if commits else folder
    if not (commit / "clicks" / "model.json").is_file():
        raise ConfigError(
            f"reward ctr: {folder} holds no click model; give a run of a click model (nonet run ctr), or a commit of it, "
            "such as runs/<id>/checkpoints/step-000123"
        )
    return commit
