"""The reward `ctr`: the click probability that a trained click model predicts for each beam.

    rewards: {click: {use: ctr, weight: 1.0, model: runs/<id>/checkpoints/step-000123}}

`model` is a checkpoint of a run of a click model, or the run's folder, whose newest checkpoint is used. A beam is scored given
its user's history. Only the labels of events that the click model was trained on are used, so no held-out label leaks. The
model gets no time for a beam. An item that was not in its training data gets the mean click rate.
"""

# Shapes: U users, W beams, P questions (pairs of a user and an item), N events of all histories together.

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nonet.errors import ConfigError
from nonet.rl.rewards.api import Reward
from nonet.rl.rewards.known import locate_ids
from nonet.types import Jagged, Rollouts

_CHUNK = 8192  # number of pairs per forward pass, which bounds memory


class PredictedClick(Reward):
    """The reward whose scores are the click probabilities of a trained model.

    Args:
        model: Folder of a checkpoint, or of a run.
    """

    def __init__(self, model: str):
        self.folder = _find_checkpoint(Path(model))

    def setup(self) -> None:
        """Load the click model: its weights, sparse rows and training data."""
        from nonet.models.deepfm import ClickModel

        self.click_model = ClickModel(self.folder)

    def score(self, r: Rollouts) -> Any:
        """Return the click probability of each beam, or the mean click rate for unknown items; [U, W] float32."""
        known = self.click_model.known  # the training data
        item_UW = locate_ids(known.item_id, r.item_id)
        user_U = locate_ids(known.user_id, r.user_id)
        past_item_N = locate_ids(known.item_id, r.history.values)
        offsets = np.asarray(r.history.offsets, np.int64)
        label_N = known.label_of(np.repeat(user_U, np.diff(offsets)), past_item_N)
        score_UW = np.full(item_UW.shape, known.rate, np.float32)
        row_P, beam_P = np.nonzero(item_UW >= 0)
        for start in range(0, len(row_P), _CHUNK):
            row, beam = row_P[start : start + _CHUNK], beam_P[start : start + _CHUNK]
            score_UW[row, beam] = self._predict(
                user_U, row, item_UW[row, beam], past_item_N, offsets, label_N
            )
        return score_UW

    def _predict(
        self,
        user_U: np.ndarray,
        row_P: np.ndarray,
        item_P: np.ndarray,
        past_item_N: np.ndarray,
        offsets: np.ndarray,
        label_N: np.ndarray,
    ) -> np.ndarray:
        """Predict the click probabilities [P] of pairs of a user and an item, given the users' past events.

        Args:
            user_U: Index of each row's user in the training data, -1 if unknown.
            row_P: Row of each pair's user in `user_U`.
            item_P: Index of each pair's item in the training data.
            past_item_N: Indices of the items of all histories, one history after another; -1 if unknown.
            offsets: Start of each row's history in `past_item_N`, and the end of the last one.
            label_N: Label of each past event: 1 liked, 0 not liked, -1 if the model was not trained on it.
        """
        from nonet.models.deepfm import get_missing_value
        from nonet.ranges import expand_ranges
        from nonet.samples.batches import ClickQuestions, make_bags, select_values

        setup, known = self.click_model.setup, self.click_model.known
        begin_P, end_P = offsets[row_P], offsets[row_P + 1]
        # Only the last `setup.history` events of a user are used; `recent_offsets` splits them by pair.
        recent, recent_offsets = expand_ranges(np.maximum(begin_P, end_P - setup.history), end_P)
        no_time_P, user_P = np.zeros(len(row_P), np.int64), user_U[row_P]
        columns = {
            name: np.where(user_P >= 0, values[np.maximum(user_P, 0)], get_missing_value(values))
            for name, values in known.columns.items()
        }
        questions = ClickQuestions(
            user=user_P,
            item=item_P,
            liked=select_values(past_item_N[recent], recent_offsets, label_N[recent] == 1),
            disliked=select_values(past_item_N[recent], recent_offsets, label_N[recent] == 0),
            activity=end_P - begin_P,
            time=no_time_P,
            since=no_time_P,
            timeless=np.ones(len(row_P), bool),
            columns=columns,
        )
        bags: dict[str, Jagged] = make_bags(
            questions, self.click_model.items, tuple(setup.features), self.click_model.keys
        )
        return self.click_model.predict(bags)


def _find_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint in the folder of a run, or the folder itself if it is a checkpoint.

    Raises:
        ConfigError: The folder has no click model.
    """
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    checkpoint = checkpoints[-1] if checkpoints else folder
    if not (checkpoint / "clicks" / "model.json").is_file():
        raise ConfigError(
            f"reward ctr: {folder} holds no click model; give a run of a click model (nonet run ctr), or a checkpoint of it, "
            "such as runs/<id>/checkpoints/step-000123"
        )
    return checkpoint
