"""`nonet export RUN DIR`: a folder from which recommendations can be made: weights, semantic ids, trie, rows and counts.

Programs that load the folder need neither Ray nor the run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import make_folder, write_whole
from nonet.deploy.opened import HistoryJoins, RequestFeatures, UserHistories
from nonet.deploy.serving.offline.exporters import EXPORTERS, VersionToExport
from nonet.embedding.reading import MappedReader, RowLayer
from nonet.errors import ConfigError, DataError
from nonet.models import MODELS
from nonet.models.generation import Corpus
from nonet.models.inference import InferenceEngine, find_default_values
from nonet.plugins import load_heavy
from nonet.samples.stores import Join
from nonet.workers.registry import COUNTS, load_recommender
from nonet.workers.roles import RunSetup

FORMAT = 1
TRANSFORMERS_FOLDER = "transformers"
"""The subfolder of an export with a Hugging Face model in transformers' format."""
_EXPORTED_SETTINGS = ("seed", "history", "model", "tables", "features", "memory")  # fields of `RunSetup`
_EXAMPLE = '''"""Recommend from this folder. It needs the packages torch, pyarrow and nonet, and no Ray."""

import sys
from pathlib import Path

from nonet.deploy.serving.offline import Exported

model = Exported(Path(__file__).parent)
history = [type(model.items[0])(item) for item in sys.argv[1:]] or model.items[:3]
print("after", ", ".join(model.titles(history)))
for item, title, score in model.recommend(history, k=10):
    print(f"{score:8.3f}  {item}  {title}")
'''


def export_run(run: str, target: Path, version: int | None = None, form: str = "folder") -> dict[str, Any]:
    """Write a version of a run into a new folder.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        target: The folder to write; it must be missing or empty.
        version: The version's number, by default that of the served one.
        form: The exporter: a name, `file.py:NAME` or `package.module:NAME`.

    Returns:
        {"run": the run's id, "version": number, "folder": path, "bytes": size of all files}.

    Raises:
        ConfigError: The folder is not empty, the version cannot be exported, or there is no such exporter.
    """
    write = load_heavy(EXPORTERS.get(form).write)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} already exists; choose a new folder to export to")
    exported = VersionToExport.open(run, version)
    make_folder(target)
    write(exported, target)
    size_bytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return {
        "run": exported.run.folder.id,
        "version": exported.version,
        "folder": str(target),
        "bytes": size_bytes,
    }


def write_folder(exported: VersionToExport, target: Path) -> None:
    """Write the folder that `Exported` loads, and an example program.

    Args:
        exported: The version to write.
        target: An empty folder.
    """
    served_run, corpus = exported.run, exported.corpus
    shutil.copyfile(exported.dense, target / "model.safetensors")
    for name, path in exported.counts.items():
        make_folder(target / "transitions")
        shutil.copyfile(path, target / "transitions" / _get_file_name(name))
    for table, arrays in exported.merge_rows().items():
        make_folder(target / "rows" / table)
        for name, array in arrays.items():
            np.save(target / "rows" / table / f"{name}.npy", array)
    for kind in ("sids", "catalogue"):
        shutil.copytree(corpus.folders[kind], target / kind)
    seq = corpus.seq
    seq.slice_users(0, 0).save(target / "sequences")  # without users: an export has no events of them
    shutil.copyfile(
        Path(corpus.folders["sequences"]) / "items.parquet", target / "sequences" / "items.parquet"
    )
    setup = served_run.setup
    write_model = MODELS.get(setup.model["use"]).exports  # the address of a function; "" for none
    if write_model != "":
        make_folder(target / TRANSFORMERS_FOLDER)
        model = exported.build_model()
        load_heavy(write_model)(model, setup.model, setup.seed, target / TRANSFORMERS_FOLDER)
    settings = {name: value for name, value in asdict(setup).items() if name in _EXPORTED_SETTINGS}
    defaults = {name: value.item() for name, value in find_default_values(seq).items()}
    description = {
        "format": FORMAT,
        "run": served_run.folder.id,
        "version": exported.version,
        "setup": settings,
        "usual": defaults,
        "width": served_run.scenario.evaluate.width,
        "joins": {name: join.model_dump() for name, join in setup.joins.items()},
    }
    (target / "example.py").write_text(_EXAMPLE, encoding="utf-8")
    # Written last, because a folder without it is not an export.
    write_whole(target / "export.json", json.dumps(description, indent=1).encode())


class Exported:
    """A model with its items, loaded from a folder that `nonet export` wrote.

    Args:
        folder: The path of the folder.

    Raises:
        DataError: The folder has no export.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        try:
            description = json.loads((folder / "export.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{folder} has no export: {error}") from None
        setup = RunSetup(**description["setup"])
        kinds = ("sequences", "sids", "catalogue", "transitions")
        self._corpus = Corpus.load({kind: str(folder / kind) for kind in kinds if (folder / kind).is_dir()})
        counts = (
            {name: folder / "transitions" / _get_file_name(name) for name in (*COUNTS, "meta")}
            if setup.memory
            else {}
        )
        rows = MappedReader(description["version"], _map_layers(folder / "rows"), setup.make_table_specs())
        recommender = load_recommender(folder / "model.safetensors", counts, rows, setup, self._corpus)
        seq = self._corpus.seq
        defaults = {name: seq.columns[name].dtype.type(value) for name, value in description["usual"].items()}
        self.engine = InferenceEngine(recommender, description["version"])
        histories = UserHistories(self._corpus, journal=None, defaults=defaults)
        stored_joins = description.get("joins", {})  # exports of earlier versions have none
        joins = HistoryJoins(
            {name: Join.model_validate(join) for name, join in stored_joins.items()}, setup.features
        )
        joins.check()
        self._features = RequestFeatures(
            self._corpus, histories, window=setup.history, width=description["width"], joins=joins or None
        )

    @cached_property
    def items(self) -> list[int | str]:
        """The ids of all items."""
        return self._corpus.item_id.tolist()

    def titles(self, items: Sequence[int | str]) -> list[str]:
        """Return the titles of items by their ids; unknown items are left out."""
        return self._features.items.get_titles(self._features.items.find_indices(items)[0])

    def recommend(
        self, history: Sequence[int | str], k: int = 10, where: str | None = None
    ) -> list[tuple[int | str, str, float]]:
        """Recommend the k best items after a history.

        Args:
            history: Item ids, newest last.
            k: Number of items.
            where: A condition over item columns.

        Returns:
            (id, title, score in nats) of each item, best first.

        Raises:
            ConfigError: An argument is wrong.
        """
        prepared = self._features.make_list_question(user=None, history=list(history), k=k, where=where)
        answer = self.engine.answer([prepared.question])[0]
        items = self._features.items
        return list(
            zip(items.get_ids(answer.item), items.get_titles(answer.item), answer.score.tolist(), strict=True)
        )


def _map_layers(folder: Path) -> dict[str, list[RowLayer]]:
    """Memory-map the rows of each table; the folder has one subfolder per table, with one file per array."""
    table_dirs = sorted(path for path in folder.iterdir() if path.is_dir())
    return {
        table_dir.name: [RowLayer.map_files({file.stem: file for file in table_dir.glob("*.npy")})]
        for table_dir in table_dirs
    }


def _get_file_name(name: str) -> str:
    """Return the name of the file of an array of transition counts, or of their metadata ("meta")."""
    return "meta.json" if name == "meta" else f"{name}.npy"
