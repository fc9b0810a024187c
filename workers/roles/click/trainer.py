"""ClickTrainer: the trainer of a click model, whose stages are trained by `ClickLearner`.

Process groups, the optimizer, checkpoints and resuming are inherited from `Trainer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.models.clicks import save_clicks
from nonet.samples.tokenised import as_array
from nonet.workers import SaveOptions
from nonet.workers.roles import CheckpointPart, StageSetup, Trainer
from nonet.workers.roles.click.data import ClickData, make_click_setup, select_joins
from nonet.workers.runtime import Replicate, method


class ClickTrainer(Trainer):
    """One rank of the trainers of a click model."""

    corpus: ClickData

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str]) -> dict[str, Any]:
        """Open the item table and build the model (`Trainer.open`)."""
        self.corpus = ClickData(self.run, folders)
        self._target: str | None = None  # Target condition of the last stage.
        return self._build_engine(make_click_setup(self.run).build)

    def _make_learner(self, stage: StageSetup) -> Any:
        """Create the learner of a stage, and remember the stage's target condition for checkpoints."""
        self._target = stage.target
        return super()._make_learner(stage)

    def _list_checkpoint_parts(self, saving: SaveOptions) -> list[CheckpointPart]:
        """Return the parts of `Trainer`; rank 0 also writes the complete click model to folder/clicks/."""
        parts = super()._list_checkpoint_parts(saving)
        if self.rank:
            return parts
        setup = make_click_setup(self.run).describe(self.model)
        items = as_array(self.corpus.items["item_id"])
        clicks = self.corpus.label_events(self._target)
        joins = select_joins(self.run)
        return [*parts, lambda folder: save_clicks(folder, setup, clicks, items, joins)]
