"""ClickTrainer: the trainer of a click model. Its stages are learned by `ClickLearner`.

Process group, optimizer, checkpoints and resuming are the trainer's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.models.deepfm import save_clicks
from nonet.models.generation import as_array
from nonet.workers import SaveOptions
from nonet.workers.roles import CheckpointPart, StageSetup, Trainer
from nonet.workers.roles.click.data import ClickData, click_setup
from nonet.workers.runtime import Replicate, method


class ClickTrainer(Trainer):
    """One rank of a click model's trainers."""

    corpus: ClickData

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str]) -> dict[str, Any]:
        """Open the item table and build the model, as a Trainer does."""
        self.corpus = ClickData(self.run, folders)
        self._target: str | None = None  # the condition of the last stage
        return self._built(click_setup(self.run).build())

    def _make_learner(self, stage: StageSetup) -> Any:
        self._target = stage.target
        return super()._make_learner(stage)

    def _parts(self, saving: SaveOptions) -> list[CheckpointPart]:
        """The trainer's parts and, from rank 0, folder/clicks/: a checkpoint is a whole click model."""
        parts = super()._parts(saving)
        if self.rank:
            return parts
        setup, items = click_setup(self.run), as_array(self.corpus.items["item_id"])
        clicks = self.corpus.clicks(self._target)
        return [*parts, lambda folder: save_clicks(folder, setup, clicks, items)]
