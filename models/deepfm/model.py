"""ClickModel: a trained DeepFM with its rows, loaded from a checkpoint's folder for inference.

    <folder>/clicks/{model.json, events.npz}     inputs of the features; weights and rows are in dense/ and sparse/

`events.npz` contains the items, and the TRAIN events with their labels, which features of a user are computed from. So a
checkpoint is a complete model, and a reward or a service needs only its folder.
"""

# Shapes: P questions, U users, I items, N TRAIN events.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from nonet.embedding.modules import EmbeddingBagCollection, ReaderRowSource, TableConfig
from nonet.embedding.reading import ReplicaReader
from nonet.embedding.storage import load_update
from nonet.embedding.tables import TableSpec
from nonet.errors import CheckpointError
from nonet.models.deepfm.deepfm import DeepFM
from nonet.samples.batches import ClickRows, ItemFacts, SparseKeys
from nonet.samples.sequences import TRAIN, Sequences
from nonet.samples.tables import NONE, as_numbers, compute_keys
from nonet.types import Jagged

_CONFIG, _EVENTS = Path("clicks", "model.json"), Path("clicks", "events.npz")
_CHUNK_EVENTS = 4096  # Events that are predicted at once.


@dataclass(frozen=True, kw_only=True)
class ClickSetup:
    """Settings from which a click model is built.

    Attributes:
        model: Options of DeepFM.
        tables: Arguments of `TableSpec` by table.
        features: Name of the table by feature.
        combiners: How the bags of a table are pooled, by table; "mean" by default.
        history: Maximum number of events of a history.
        seed: Seed of the run.
    """

    model: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]
    features: Mapping[str, str]
    combiners: Mapping[str, str]
    history: int
    seed: int

    def make_table_configs(self) -> dict[str, TableConfig]:
        """Return the configurations of the tables for embedding modules."""
        return {
            name: TableConfig(
                TableSpec(**spec),
                tuple(feature for feature, table in self.features.items() if table == name),
                self.combiners.get(name, "mean"),
            )
            for name, spec in self.tables.items()
        }

    def build(self) -> DeepFM:
        """Create the dense part with initial weights."""
        options = {name: value for name, value in self.model.items() if name != "use"}
        dims = {feature: int(self.tables[table]["dim"]) for feature, table in self.features.items()}
        return DeepFM(dims, seed=self.seed, **options)


@dataclass(frozen=True)
class KnownClicks:
    """The facts of the TRAIN events from which a click model's features are computed.

    Attributes:
        item_id: Ids of the items.
        user_id: Ids [U] of the users, sorted.
        rate: Mean label.
        pair: (user, item) pairs of the events, as keys user * I + item, ascending.
        liked: Newest label of each pair.
        columns: Newest value [U] of each user by column; a missing value for users without events.
    """

    item_id: np.ndarray
    user_id: np.ndarray
    rate: float
    pair: np.ndarray
    liked: np.ndarray
    columns: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, clicks: ClickRows, item_id: np.ndarray) -> KnownClicks:
        """Collect the facts from the TRAIN events: the newest label of each pair, and the newest value of each user and column.

        Labels that became known only after the user's first held-out event are left out, because beams are scored at such times.
        """
        rows, seq = clicks.find_rows(TRAIN), clicks.seq
        rate = float(clicks.label[rows].mean())
        newest_index = len(rows) - 1 - np.unique(seq.user[rows][::-1], return_index=True)[1]
        users_with_rows = seq.user[rows][newest_index]
        columns = {}
        for name in clicks.features:
            if name in seq.columns:
                columns[name] = np.full(
                    len(seq), get_missing_value(seq.columns[name]), seq.columns[name].dtype
                )
                columns[name][users_with_rows] = seq.columns[name][rows][newest_index]
        if clicks.known_from is not None:
            rows = rows[clicks.known_from[rows] <= find_first_held_out(seq)[seq.user[rows]]]
        pair_of_row = seq.user[rows] * len(item_id) + seq.item[rows]
        pair, reversed_index = np.unique(pair_of_row[::-1], return_index=True)
        label = clicks.label[rows][::-1][reversed_index] > 0
        user_id = np.asarray(seq.user_id)
        user_id = user_id.astype(np.str_) if user_id.dtype == object else user_id
        return cls(item_id, user_id, rate, pair, label, columns)

    def label_of(self, user: np.ndarray, item: np.ndarray) -> np.ndarray:
        """Return the labels of (user, item) index pairs: 1 liked, 0 not liked, -1 without an event or if an index is -1."""
        pair = np.where((user < 0) | (item < 0), -1, user * len(self.item_id) + item)
        index = np.minimum(np.searchsorted(self.pair, pair), max(len(self.pair) - 1, 0))
        return np.where(self.pair[index] == pair, self.liked[index].astype(np.int64), -1)


def find_first_held_out(seq: Sequences) -> np.ndarray:
    """Return the time [U] of each user's first event outside the TRAIN split; the largest int64 without one."""
    first_event = seq.offsets[:-1] + seq.train_lengths
    time = np.append(seq.time, np.iinfo(np.int64).max)
    return np.where(first_event < seq.offsets[1:], time[first_event], np.iinfo(np.int64).max)


def get_missing_value(values: np.ndarray) -> float | int:
    """Return the value that stands for a missing one in a column: NaN for numbers, NONE for ids."""
    return np.nan if values.dtype.kind == "f" else NONE


class ClickModel:
    """Predicts click probabilities with the weights and rows of a checkpoint."""

    def __init__(self, folder: Path):
        config = _read_config(folder)
        self.setup = ClickSetup(**config["setup"])
        configs = self.setup.make_table_configs()
        specs = {name: table.spec for name, table in configs.items()}
        reader = ReplicaReader(specs)
        reader.apply(load_update(folder, specs))
        self.bags = EmbeddingBagCollection(configs, ReaderRowSource(reader)).eval()
        self.model = self.setup.build().eval()
        self.model.load_state_dict(load_file(folder / "dense" / "model.safetensors"))
        arrays = np.load(folder / _EVENTS)
        self.items = ItemFacts(
            Jagged(arrays["category"], arrays["category_offsets"]),
            arrays["year"],
            tuple(config["categories"]),
        )
        self.keys = (
            self._make_keys(arrays["user_id"], arrays["item_id"]) if config.get("keys") == "ids" else None
        )
        columns = {name: arrays[f"column:{name}"] for name in config["columns"]}
        self.known = KnownClicks(
            arrays["item_id"], arrays["user_id"], config["rate"], arrays["pair"], arrays["liked"], columns
        )

    def _make_keys(self, user_id: np.ndarray, item_id: np.ndarray) -> SparseKeys:
        """Compute the sparse keys of users and items from their ids."""
        user, item = (
            compute_keys(space, as_numbers(ids)) for space, ids in (("user", user_id), ("item", item_id))
        )
        return SparseKeys(user, item, self.items.category_key)

    @torch.no_grad()
    def predict(self, bags: Mapping[str, Jagged]) -> np.ndarray:
        """Predict click probabilities [P] float32 from bags of keys."""
        return torch.sigmoid(self.model(self.bags(bags))).numpy()

    def predict_events(self, clicks: ClickRows, index: np.ndarray) -> np.ndarray:
        """Predict the click probabilities [P] of events, in chunks."""
        parts = [
            self.predict(clicks.batch(index[start : start + _CHUNK_EVENTS]))
            for start in range(0, len(index), _CHUNK_EVENTS)
        ]
        return np.concatenate([np.empty(0, np.float32), *parts])


def save_clicks(folder: Path, setup: ClickSetup, clicks: ClickRows, item_id: np.ndarray) -> list[Path]:
    """Write the files in <folder>/clicks/ that ClickModel needs besides weights and rows, and return their paths."""
    known = KnownClicks.of(clicks, item_id)
    (folder / _CONFIG).parent.mkdir(parents=True, exist_ok=True)
    fields = {name: getattr(setup, name) for name in setup.__dataclass_fields__}
    setup_dict = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()
    }
    config = {
        "setup": setup_dict,
        "rate": known.rate,
        "keys": "places" if clicks.keys is None else "ids",
        "columns": list(known.columns),
        "categories": list(clicks.items.names),
    }
    (folder / _CONFIG).write_text(json.dumps(config), encoding="utf-8")
    arrays: dict[str, Any] = {f"column:{name}": values for name, values in known.columns.items()}
    arrays |= {name: getattr(known, name) for name in ("item_id", "user_id", "pair", "liked")}
    arrays |= {"year": clicks.items.year, "category": clicks.items.categories.values}
    np.savez(folder / _EVENTS, category_offsets=clicks.items.categories.offsets, **arrays)
    return [folder / _CONFIG, folder / _EVENTS]


def _read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a click model from a checkpoint."""
    try:
        return json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except OSError:
        raise CheckpointError(
            f"{folder} holds no click model: there is no {_CONFIG}; name a checkpoint of a run of a click model, "
            "such as runs/<id>/checkpoints/step-000123"
        ) from None
