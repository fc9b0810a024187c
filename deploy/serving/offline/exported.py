"""Recommendations from a folder that `nonet export` wrote, without Ray and without the run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nonet.deploy.opened import PreparedQuestion, RequestFeatures, UserHistories, Vocabulary
from nonet.deploy.serving.offline.exported_stores import open_joins
from nonet.embedding.reading import MappedReader, RowLayer
from nonet.errors import DataError
from nonet.models import MODELS
from nonet.models.generation import Corpus, Recommender, list_memory_files
from nonet.models.inference import InferenceEngine, Question
from nonet.plugins import load_heavy
from nonet.run_code import select_export_settings
from nonet.trust import add_references, guard_folder
from nonet.workers.registry import load_recommender, make_recommender
from nonet.workers.roles import RunSetup

FORMAT = 3
# An export of format 2 has no options of votes that validation chose, and one of format 1 the options and all weights of a model
# that can be opened from `TRANSFORMERS_FOLDER`.
_OLDEST_FORMAT = 1
DENSE_WEIGHTS = "model.safetensors"
TRANSFORMERS_FOLDER = "transformers"
"""The subfolder of an export with a Hugging Face model in transformers' format."""


class ExportedModel:
    """The items of an export, with its questions and the counts of absent stores and of unknown items.

    Attributes:
        unknown: Number of questions by id that no item has; these ids are left out.
        missing: Number of questions for which the store of a join was absent or did not answer, by the name of the join. Its
            columns are missing then, as those of an unknown key.
    """

    def __init__(self, corpus: Corpus, features: RequestFeatures):
        self._corpus, self._features = corpus, features
        self.missing: Counter[str] = Counter()
        self.unknown: Counter[int | str] = Counter()

    @cached_property
    def items(self) -> list[int | str]:
        """The ids of all items."""
        return self._corpus.item_id.tolist()

    def titles(self, items: Sequence[int | str]) -> list[str]:
        """Return the titles of items by their ids; unknown items are left out."""
        return self._features.items.get_titles(self._features.items.find_indices(items)[0])

    def _read_joined_columns(self, prepared: PreparedQuestion) -> Question:
        """Return a question with its joined columns, and count absent stores and unknown items."""
        self.unknown.update(set(prepared.unknown))
        [prepared] = self._features.read_available_columns([prepared])
        self.missing.update(prepared.missing)
        return prepared.question


class Exported(ExportedModel):
    """A model with its items, loaded from a folder that `nonet export` wrote.

    Args:
        folder: The path of the folder.
        stores: Addresses of stores by the name of their join, instead of those that the run had.

    Raises:
        DataError: The folder has no export, an incomplete one, or one of a newer version.
        ConfigError: A given store does not exist, or has no column that the model reads.
    """

    def __init__(self, folder: str | Path, stores: Mapping[str, str] | None = None):
        folder = Path(folder)
        description = read_description(folder)
        setup = open_setup(folder, description, makes_lists=True)
        kinds = ("sequences", "sids", "catalogue", "transitions")
        corpus = Corpus.load({kind: str(folder / kind) for kind in kinds if (folder / kind).is_dir()})
        recommender = _load_recommender(folder, setup, description, corpus)
        seq = corpus.seq
        defaults = {name: seq.columns[name].dtype.type(value) for name, value in description["usual"].items()}
        self.engine = InferenceEngine(recommender, description["version"])
        joins = open_joins(
            folder,
            description.get("joins", {}),
            description.get("copied_stores", ()),
            stores or {},
            setup.features,
        )
        features = RequestFeatures(
            corpus,
            UserHistories(corpus, journal=None, defaults=defaults),
            window=setup.history,
            width=description["width"],
            joins=joins or None,
            vocabulary=read_vocabulary(description),
            where=description.get("where"),
        )
        super().__init__(corpus, features)
        self._withdrawn = tuple(description.get("withdrawn", ()))

    def recommend(
        self,
        history: Sequence[int | str | Mapping[str, Any]],
        k: int = 10,
        where: str | None = None,
        *,
        user: int | str | None = None,
        time: int | str | None = None,
    ) -> list[tuple[int | str, str, float]]:
        """Recommend the k best items after a history, as a server does for the same events.

        Args:
            history: Item ids, newest last, or events {"item": id, "time": its time, "event": kind, "values": values by column};
                all but "item" may be missing. Ids that no item has are left out and counted in `unknown`. Times are
                numbers in the unit of the run's log, or ISO text.
            k: Number of items.
            where: A condition over item columns.
            user: The user's id, by which the user's sparse row and stores keyed by users are read.
            time: The time of the request, by default the present. Events that are not older are left out.

        Returns:
            (id, title, score in nats) of each item, best first.

        Raises:
            ConfigError: An argument is wrong.
        """
        prepared = self._features.prepare_list_question(
            user, list(history), k, where=where, withdrawn=self._withdrawn, time=time
        )
        answer = self.engine.answer([self._read_joined_columns(prepared)])[0]
        items = self._features.items
        return list(
            zip(items.get_ids(answer.item), items.get_titles(answer.item), answer.score.tolist(), strict=True)
        )


def read_description(folder: Path) -> dict[str, Any]:
    """Read export.json. Raises DataError if it cannot be read, is of a newer version, or lists files that the folder lacks."""
    try:
        description = json.loads((folder / "export.json").read_text(encoding="utf-8"))
        written_format = int(description["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} has no export: export.json cannot be read ({type(error).__name__}); use a folder that "
            "`nonet export RUN DIR` wrote"
        ) from None
    if not _OLDEST_FORMAT <= written_format <= FORMAT:
        raise DataError(
            f"{folder} is an export of format {written_format}, and this version of Nonet reads {_OLDEST_FORMAT} to {FORMAT}; "
            "open it with the version that wrote it, or export the run again"
        )
    _check_files(folder, description.get("files", {}))  # exports of format 1 do not list their files
    guard_folder(folder)
    add_references(folder, select_export_settings(description))
    return description


def _is_read_from_subfolder(setup: RunSetup, description: Mapping[str, Any]) -> bool:
    """Return whether the model is opened from `TRANSFORMERS_FOLDER` instead of from `DENSE_WEIGHTS`."""
    return description["format"] > 1 and MODELS.get(setup.model["use"]).imports != ""


def open_setup(folder: Path, description: Mapping[str, Any], *, makes_lists: bool) -> RunSetup:
    """Return the settings of the model. Raises DataError if it makes lists and should not, or the other way round."""
    setup = RunSetup(**description["setup"])
    if MODELS.get(setup.model["use"]).makes_lists != makes_lists:
        kind, opener = ("a click model", "ExportedClicks") if makes_lists else ("a recommender", "Exported")
        raise DataError(f"{folder} has {kind}; open it with nonet.deploy.serving.offline.{opener}")
    return setup


def read_vocabulary(description: Mapping[str, Any]) -> Vocabulary | None:
    """Return how the run names things; None for an export of format 1, whose times are unix seconds."""
    return Vocabulary.from_dict(description["vocabulary"]) if "vocabulary" in description else None


def _check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise DataError if a file of an export does not exist, or is cut.

    Args:
        folder: The folder of the export.
        sizes: Size in bytes of each file by its path in the folder. JSON files may be edited.
    """
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            problem = f"it has no {name}"
        elif path.suffix != ".json" and path.stat().st_size != size:
            problem = f"{name} has {path.stat().st_size} of {size} bytes"
        else:
            continue
        raise DataError(f"{folder} is incomplete: {problem}; copy the whole folder, or export the run again")


def _load_recommender(
    folder: Path, setup: RunSetup, description: Mapping[str, Any], corpus: Corpus
) -> Recommender:
    """Load the model of an export with its rows and counts."""
    counts = {}
    if setup.memory:
        counts = list_memory_files(folder / "transitions")
    layers = {table: [map_layer(folder / "rows" / table)] for table in setup.tables}
    reader = MappedReader(description["version"], layers, setup.make_table_specs())
    if not _is_read_from_subfolder(setup, description):
        return load_recommender(folder / DENSE_WEIGHTS, counts, reader, setup, corpus)
    load_model = load_heavy(MODELS.get(setup.model["use"]).imports)
    other_format = folder / TRANSFORMERS_FOLDER
    model = load_model(setup.model, corpus.codes, setup.get_feature_dims(), setup.seed, other_format)
    return make_recommender(model, counts, reader, setup, corpus)


def map_layer(folder: Path) -> RowLayer:
    """Memory-map the rows of a table; the folder has one file per array. Raises DataError if it does not exist."""
    if not folder.is_dir():
        raise DataError(f"there are no rows in {folder}; copy the whole folder, or export the run again")
    return RowLayer.map_files({file.stem: file for file in folder.glob("*.npy")})
