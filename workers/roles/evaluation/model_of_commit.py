"""The model of a checkpoint with its sparse rows, and its scores with and without the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nonet.embedding.reading import ReplicaReader
from nonet.embedding.storage import load_update
from nonet.models import build_model
from nonet.models.generation import (
    Corpus,
    Recommender,
    get_memory_weights,
    get_nearest_share,
    get_signal_weights,
)
from nonet.workers import load_model
from nonet.workers.devices import HOST
from nonet.workers.roles import RunSetup

# Shapes: P prompts, I items.


def load_recommender(
    run: RunSetup, corpus: Corpus, folder: Path, device: str = HOST, process_group: Any = None
) -> Recommender:
    """Load the model and sparse rows of a checkpoint on a device.

    Args:
        run: Settings of the run.
        corpus: Sequences, items and semantic ids.
        folder: Folder of the checkpoint.
        device: Name of the device.
        process_group: Ranks that divide the weights of the model, and that all call this function; None for a whole model.
    """

    def build() -> torch.nn.Module:
        return build_model(run.model, corpus.codes, run.get_feature_dims(), run.seed)

    if process_group is None:
        model: Any = build().to(device)
    else:
        from nonet.workers.engines.division import build_divided  # Imports FSDP: a second of each start.

        model = build_divided(build, process_group, torch.device(device))
    load_model(model, folder / "dense")
    reader = ReplicaReader(run.make_table_specs())
    reader.apply(load_update(folder, run.make_table_specs()))
    return Recommender(model, reader, dict(run.features), corpus, run.history, run.make_voters(corpus))


class ModelScores:
    """A score function: the log-probabilities of a model with its memory, if it has one.

    Attributes:
        own: Scores [P, I] of the model alone, without its memory, in the last call; None without a memory.
    """

    def __init__(self, recommender: Recommender):
        self._recommender = recommender
        self.own: np.ndarray | None = None

    def get_fitted_weights(self) -> dict[str, float]:
        """Return the fitted weights of the memory: l, b and c, m if nearest items vote, and g of each signal."""
        model, voters = self._recommender.model, self._recommender.voters
        nearest_weight = {"m": get_nearest_share(model)} if voters is not None and voters.nearest else {}
        signals = [] if voters is None else voters.signal_names
        signal_weights = {
            f"g {name}": weight for name, weight in zip(signals, get_signal_weights(model), strict=True)
        }
        return dict(zip("lbc", get_memory_weights(model), strict=True)) | nearest_weight | signal_weights

    def __call__(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the scores of all items for prompts, [P, I], and set `own`."""
        batch = self._recommender.batch(users, positions)
        if self._recommender.voters is None:
            return self._recommender.score_catalogue(batch, users, positions).numpy()
        mixed, own = self._recommender.score_with_and_without_votes(batch, users, positions)
        self.own = own.numpy()
        return mixed.numpy()
