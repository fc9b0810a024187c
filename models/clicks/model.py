"""ClickModel: a trained click model with its rows, loaded from a checkpoint's folder for inference.

    <folder>/clicks/{model.json, events.npz}     inputs of the features; weights and rows are in dense/ and sparse/

`events.npz` contains the items, the TRAIN events with their labels, which features of a user are computed from, and the edges of
the graphs that features read. So a checkpoint is a complete model, and a reward or a service needs only its folder.
"""

# Shapes: P questions (pairs of a context and an item), Q contexts, U users, I items, N TRAIN events, T tasks.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nonet.embedding.modules import EmbeddingBagCollection, ReaderRowSource, RowSource, TableConfig
from nonet.embedding.reading import ReplicaReader
from nonet.embedding.storage import load_update
from nonet.embedding.tables import TableSpec
from nonet.errors import CheckpointError
from nonet.models import build_model
from nonet.models.clicks.known_clicks import LIKED, NOT_LIKED, KnownClicks
from nonet.ranges import expand_ranges
from nonet.samples.batches import (
    ClickQuestions,
    ClickRows,
    ItemFacts,
    SparseKeys,
    make_bags,
    select_values,
)
from nonet.samples.batches.graphs import Graphs, History
from nonet.samples.stores import Join, StoreJoins
from nonet.samples.tables import as_numbers, compute_keys
from nonet.stored_tensors import StoredTensors
from nonet.trust import add_stored_references
from nonet.types import Jagged

CONFIG, EVENTS = Path("clicks", "model.json"), Path("clicks", "events.npz")
"""The files of a click model in a checkpoint, besides weights and rows."""
_GRAPH = "graph:"  # Prefix of the names of the arrays of graphs.
SOURCES = "sources"
"""The option of a stored model that has the folder of the user's own files; that of the checkpoint's run, if there is one."""
_CHUNK_EVENTS, _CHUNK_PAIRS = 4096, 8192  # Events and pairs that are predicted at once, which bounds memory.


@dataclass(frozen=True, kw_only=True)
class ClickSetup:
    """Settings from which a click model is built.

    Attributes:
        model: Arguments of `build_model`.
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

    @classmethod
    def read(cls, path: Path) -> ClickSetup:
        """Read the settings from the configuration of a model, as `CONFIG` in a checkpoint."""
        return cls(**_read_config(path, str(path))["setup"])

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

    def build_bags(self, source: RowSource) -> EmbeddingBagCollection:
        """Create the collection that reads the rows of the features of a batch from a source."""
        return EmbeddingBagCollection(self.make_table_configs(), source, self.sequences)

    def describe(self, module: Any) -> ClickSetup:
        """Return the settings to store with a trained module: with its `stored_options`, if it has any."""
        return replace(self, model={**self.model, **getattr(module, "stored_options", {})})

    @property
    def sequences(self) -> dict[str, int]:
        """By feature whose rows are not pooled, the number of its newest ids that are read."""
        return dict.fromkeys(self.model.get("sequences", ()), self.history)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks in the order of the model's logits; "" is the target of the stage."""
        return ("", *self.model.get("tasks", ()))

    def build(self) -> Any:
        """Create the dense part with initial weights.

        Returns:
            A module that computes logits [B] from pooled rows [B, D] by feature, or [B, T] if there are several tasks.
        """
        dims = {feature: int(self.tables[table]["dim"]) for feature, table in self.features.items()}
        return build_model({"use": "deepfm", **self.model}, (), dims, self.seed)

    def load_module(self, dense: Path) -> Any:
        """Create the dense part with the weights of a file, for inference."""
        module = self.build().eval()
        module.load_state_dict(dict(StoredTensors(dense)))
        return module


@dataclass(frozen=True)
class ClickContexts:
    """Users with their past events, at the moments of Q questions.

    Attributes:
        user: Index of each user in the training data [Q]; -1 if unknown.
        user_id: The users' own ids [Q], with which stores are read.
        past: Indices of the items of each user's past events, newest last; -1 for unknown items.
        label: Label of each past event: LIKED, NOT_LIKED, or UNLABELLED if it is not known.
        older: Number of older events of each user that are left out [Q].
        time: Unix seconds of the questions [Q], as of which stores are read.
        since: Seconds since the user's previous event [Q]; -1 if there is none.
        timeless: Mask [Q] of the questions without time features.
        columns: Columns of the interactions by name, [Q] each.
        past_time: Unix seconds of the past events, of which those that are newer than the model's data add edges to graphs; None
            if none is.
    """

    user: np.ndarray
    user_id: np.ndarray
    past: Jagged
    label: np.ndarray
    older: np.ndarray
    time: np.ndarray
    since: np.ndarray
    timeless: np.ndarray
    columns: Mapping[str, np.ndarray]
    past_time: np.ndarray | None = None


class ClickModel:
    """Predicts click probabilities with the weights and rows of a checkpoint."""

    def __init__(self, folder: Path):
        config, arrays = _read_config(folder / CONFIG, str(folder)), np.load(folder / EVENTS)
        model = config["setup"]["model"]
        if SOURCES in model:
            # The run's copies of the user's own files.
            model[SOURCES] = str(folder.parent.parent / "sources")
        setup = ClickSetup(**config["setup"])
        specs = {name: table.spec for name, table in setup.make_table_configs().items()}
        reader = ReplicaReader(specs)
        reader.apply(load_update(folder, specs))
        self._build(config, arrays, folder / "dense" / "model.safetensors", reader)

    @classmethod
    def from_files(cls, config: Path, events: Path, dense: Path, reader: Any) -> ClickModel:
        """Load a model from the files of a published version.

        Args:
            config: The configuration, as `CONFIG` in a checkpoint.
            events: The items and training events, as `EVENTS` in a checkpoint.
            dense: The dense weights.
            reader: Reader of the sparse rows.
        """
        model = cls.__new__(cls)
        model._build(_read_config(config, str(config)), np.load(events), dense, reader)
        return model

    def _build(self, config: dict[str, Any], arrays: Any, dense: Path, reader: Any) -> None:
        """Build the modules and the facts of the model."""
        self.setup = ClickSetup(**config["setup"])
        self.bags = self.setup.build_bags(ReaderRowSource(reader)).eval()
        self.model = self.setup.load_module(dense)
        self.items = ItemFacts(
            Jagged(arrays["category"], arrays["category_offsets"]),
            arrays["year"],
            tuple(config["categories"]),
            {name: arrays[f"item column:{name}"] for name in config.get("item_columns", ())},
        )
        joins = {name: Join(**join) for name, join in config.get("joins", {}).items()}
        self.joins = StoreJoins(joins) if joins else None
        if config.get("keys") != "ids":
            raise CheckpointError(
                f"the click model in {dense.parent} is of Nonet 0.1; train it again with this version"
            )
        self.keys = self._make_keys(arrays["user_id"], arrays["item_id"])
        columns = {name: arrays[f"column:{name}"] for name in config["columns"]}
        self.known = KnownClicks(
            arrays["item_id"],
            arrays["user_id"],
            (config["rate"], *config.get("task_rates", ())),
            arrays["pair"],
            arrays["liked"],
            columns,
        )
        self.graphs = None
        if "graphs" in config:
            names = [name for name in arrays.files if name.startswith(_GRAPH)]
            self.graphs = Graphs.from_arrays(
                config["graphs"],
                {name.removeprefix(_GRAPH): arrays[name] for name in names},
                self.setup.seed,
                {"item": self.keys.item, "user": self.keys.user},
                arrays["newest_time"],
            )

    def _make_keys(self, user_id: np.ndarray, item_id: np.ndarray) -> SparseKeys:
        """Compute the sparse keys of users and items from their ids."""
        user, item = (
            compute_keys(space, as_numbers(ids)) for space, ids in (("user", user_id), ("item", item_id))
        )
        return SparseKeys(user, item, self.items.category_key)

    @torch.no_grad()
    def predict(self, bags: Mapping[str, Jagged]) -> np.ndarray:
        """Predict probabilities [P, T] float32 of the target and the tasks from bags of keys."""
        probability = torch.sigmoid(self.model(self.bags(bags))).numpy()
        return probability.reshape(len(probability), -1)

    def predict_events(self, clicks: ClickRows, index: np.ndarray) -> np.ndarray:
        """Predict the probabilities [P, T] of events, in chunks."""
        parts = [
            self.predict(clicks.batch(index[start : start + _CHUNK_EVENTS]))
            for start in range(0, len(index), _CHUNK_EVENTS)
        ]
        return np.concatenate([self._make_empty(), *parts])

    def predict_pairs(
        self,
        contexts: ClickContexts,
        context_P: np.ndarray,
        item_P: np.ndarray,
        joined_P: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Predict the probabilities [P, T] of pairs of a context and an item, both given by index, in chunks.

        Args:
            contexts: The contexts.
            context_P: Index of each pair's context.
            item_P: Index of each pair's item.
            joined_P: Columns that were joined from stores; None to read them.
        """
        if joined_P is None and self.joins is not None:
            user_id, time_P = contexts.user_id[context_P], contexts.time[context_P]
            joined_P = self.joins.read_event_columns(self.known.item_id[item_P], user_id, time_P)
        parts = [self._make_empty()]
        for start in range(0, len(item_P), _CHUNK_PAIRS):
            chunk = slice(start, start + _CHUNK_PAIRS)
            joined = {name: values[chunk] for name, values in (joined_P or {}).items()}
            parts.append(self._predict_chunk(contexts, context_P[chunk], item_P[chunk], joined))
        return np.concatenate(parts)

    def _make_empty(self) -> np.ndarray:
        """Return the probabilities [0, T] of no question."""
        return np.empty((0, len(self.setup.tasks)), np.float32)

    def _predict_chunk(
        self,
        contexts: ClickContexts,
        context_P: np.ndarray,
        item_P: np.ndarray,
        joined: Mapping[str, np.ndarray],
    ) -> np.ndarray:
        """Predict the probabilities [P, T] of pairs."""
        begin_P, end_P = contexts.past.offsets[context_P], contexts.past.offsets[context_P + 1]
        # Only the last `setup.history` events of a user are used; `recent_offsets` splits them by pair.
        recent, recent_offsets = expand_ranges(np.maximum(begin_P, end_P - self.setup.history), end_P)
        past, label = contexts.past.values[recent], contexts.label[recent]
        columns = {name: values[context_P] for name, values in contexts.columns.items()} | dict(joined)
        features, user = tuple(self.setup.features), contexts.user[context_P]
        neighbours = {}
        if self.graphs is not None:
            history = _select_histories(contexts, context_P)
            time_P = contexts.time[context_P]
            neighbours = self.graphs.find_neighbours(features, user, item_P, time_P, history)
        questions = ClickQuestions(
            user=user,
            item=item_P,
            liked=select_values(past, recent_offsets, (label == LIKED) & (past >= 0)),
            disliked=select_values(past, recent_offsets, (label == NOT_LIKED) & (past >= 0)),
            activity=end_P - begin_P + contexts.older[context_P],
            time=contexts.time[context_P],
            since=contexts.since[context_P],
            timeless=contexts.timeless[context_P],
            columns=columns,
            neighbours=neighbours,
        )
        return self.predict(make_bags(questions, self.items, features, self.keys))


def _select_histories(contexts: ClickContexts, context_P: np.ndarray) -> History | None:
    """Return the past events of the contexts [P] of pairs; None if all of them are in the data of the model."""
    if contexts.past_time is None:
        return None
    context, pair_context_P = np.unique(context_P, return_inverse=True)
    index, offsets = expand_ranges(contexts.past.offsets[context], contexts.past.offsets[context + 1])
    past = Jagged(contexts.past.values[index], offsets)
    return History(contexts.user[context], past, contexts.past_time[index], pair_context_P)


def save_clicks(
    folder: Path,
    setup: ClickSetup,
    clicks: ClickRows,
    item_id: np.ndarray,
    joins: Mapping[str, Join] | None = None,
) -> list[Path]:
    """Write the files in <folder>/clicks/ that ClickModel needs besides weights and rows, and return their paths.

    Args:
        folder: Folder of the checkpoint.
        setup: Settings of the model.
        clicks: Rows with the labels of the newest stage.
        item_id: The items' own ids [I].
        joins: The joins from which the model reads features, by name.
    """
    known = KnownClicks.from_rows(clicks, item_id)
    (folder / CONFIG).parent.mkdir(parents=True, exist_ok=True)
    fields = {name: getattr(setup, name) for name in setup.__dataclass_fields__}
    setup_dict = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()
    }
    config = {
        "setup": setup_dict,
        "rate": known.rates[0],
        "keys": "ids",
        "columns": list(known.columns),
        "categories": list(clicks.items.names),
    }
    if len(known.rates) > 1:
        config["task_rates"] = known.rates[1:]
    if clicks.items.columns:
        config["item_columns"] = list(clicks.items.columns)
    if joins:
        config["joins"] = {name: join.model_dump() for name, join in joins.items()}
    graphs = clicks.seq.graphs
    if graphs:
        config["graphs"] = graphs.describe()
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    arrays: dict[str, Any] = {f"column:{name}": values for name, values in known.columns.items()}
    arrays |= {name: getattr(known, name) for name in ("item_id", "user_id", "pair", "liked")}
    arrays |= {f"item column:{name}": values for name, values in clicks.items.columns.items()}
    arrays |= {"year": clicks.items.year, "category": clicks.items.categories.values}
    if graphs:
        arrays |= {_GRAPH + name: values for name, values in graphs.to_arrays().items()}
        arrays["newest_time"] = graphs.until
    np.savez(folder / EVENTS, category_offsets=clicks.items.categories.offsets, **arrays)
    return [folder / CONFIG, folder / EVENTS]


def _read_config(path: Path, holder: str) -> dict[str, Any]:
    """Read the configuration of a click model; `holder` is named in the error if there is none."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise CheckpointError(
            f"{holder} holds no click model: there is no {CONFIG}; name a checkpoint of a run of a click model, "
            "such as runs/<id>/checkpoints/step-000123"
        ) from None
    add_stored_references(path, config["setup"]["model"])
    return config
