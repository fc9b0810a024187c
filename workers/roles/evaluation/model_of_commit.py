"""The model of a commit, ready to be asked: with its sparse rows, and with its memory beside the model alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nonet.embedding.reading import ReplicaReader
from nonet.embedding.storage import load_update
from nonet.models import build_model
from nonet.models.generation import Corpus, Recommender, get_memory_weights, get_nearest_share
from nonet.workers import load_model
from nonet.workers.devices import HOST
from nonet.workers.roles import RunSetup

# Shapes: P prompts, I items.


def load_recommender(run: RunSetup, corpus: Corpus, folder: Path, device: str = HOST) -> Recommender:
    """The model of a commit on a device, with its sparse rows, ready to be asked."""
    model = build_model(run.model, corpus.codes, run.feature_dims(), run.seed).to(device)
    load_model(model, folder / "dense")
    reader = ReplicaReader(run.specs())
    reader.apply(load_update(folder, run.specs()))
    return Recommender(model, reader, dict(run.features), corpus, run.history, run.voters(corpus))


class ModelScores:
    """Scores of a model with its memory; `own`: those of the model alone [P, I] in the newest call, None without a memory."""

    def __init__(self, recommender: Recommender):
        self._recommender = recommender
        self.own: np.ndarray | None = None

    def weights(self) -> dict[str, float]:
        """The fitted weights of the memory: l, b and c, and m where the nearest items vote."""
        model, voters = self._recommender.model, self._recommender.voters
        share = {"m": get_nearest_share(model)} if voters is not None and voters.nearest else {}
        return dict(zip("lbc", get_memory_weights(model), strict=True)) | share

    def __call__(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        batch = self._recommender.batch(users, positions)
        if self._recommender.voters is None:
            return self._recommender.score_catalogue(batch, users, positions).numpy()
        mixed, own = self._recommender.score_with_and_without_votes(batch, users, positions)
        self.own = own.numpy()
        return mixed.numpy()
