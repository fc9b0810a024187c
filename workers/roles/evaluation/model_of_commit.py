"""The model of a checkpoint with its sparse rows, and its scores with and without parts of the memory."""

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

ALONE = "model alone"
"""Way of ranking with a memory's model alone, without votes; other ways are "exhaustive", "beam" and "without PART"."""


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
    """A score function: the log-probabilities of a model with its memory, if it has one."""

    def __init__(self, recommender: Recommender):
        self._recommender = recommender

    @property
    def ablations(self) -> list[str]:
        """Names of what `compute_with_ablations` returns: the model alone, then the memory without each of several parts."""
        voters = self._recommender.voters
        parts = [] if voters is None else voters.parts
        return [] if voters is None else [ALONE, *(f"without {part}" for part in parts)]

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
        """Return the scores of all items for prompts, [P, I]."""
        batch = self._recommender.batch(users, positions)
        return self._recommender.score_catalogue(batch, users, positions).numpy()

    def compute_with_ablations(
        self, users: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the scores of all items for prompts, [P, I], and those of each of `ablations` with the same weights."""
        batch, voters = self._recommender.batch(users, positions), self._recommender.get_voters()
        assert voters is not None, "there are ablations of a memory only"
        ablated = [None, *(voters.leave_out(part) for part in voters.parts)]
        scores = self._recommender.score_with_voters(batch, users, positions, [voters, *ablated])
        whole, *others = (each.numpy() for each in scores)
        return whole, dict(zip(self.ablations, others, strict=True))
