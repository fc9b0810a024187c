"""The export of a click model: a folder that scores items without Ray and without the run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder
from nonet.deploy.opened import ClickRequestFeatures, UserHistories, make_missing_values
from nonet.deploy.serving.offline.export import make_example, write_description, write_shared_parts
from nonet.deploy.serving.offline.exported import (
    DENSE_WEIGHTS,
    ExportedModel,
    map_layer,
    open_setup,
    read_description,
    read_vocabulary,
)
from nonet.deploy.serving.offline.exported_stores import open_joins
from nonet.deploy.serving.offline.exporters import VersionToExport
from nonet.embedding.reading import MappedReader
from nonet.errors import ConfigError
from nonet.models import MODELS
from nonet.models.clicks import ClickSetup, EventLabeller
from nonet.models.generation import Corpus
from nonet.models.inference import ClickEngine
from nonet.plugins import load_heavy
from nonet.suggest import join_names

_SHOWN = """for probability, item in sorted(zip(probabilities, model.items), reverse=True)[:10]:
    print(f"{probability:8.4f}  {item}  {model.titles([item])[0]}")"""
_ITEMS_PER_QUESTION = 1000


def write_click_folder(exported: VersionToExport, target: Path) -> None:
    """Write the folder that `ExportedClicks` loads, and an example program.

    Args:
        exported: The version to write.
        target: An empty folder.
    """
    run, stage = exported.run, exported.run.setup.target or ""
    description = write_shared_parts(exported, target)
    shutil.copyfile(exported.dense, target / DENSE_WEIGHTS)
    make_folder(target / "clicks")
    for name, path in exported.counts.items():
        shutil.copyfile(path, target / "clicks" / name)
    spec = MODELS.get(run.setup.model["use"])
    if spec.exports != "":
        setup = ClickSetup.read(exported.counts["click_model"])
        module = setup.load_module(exported.dense)
        load_heavy(spec.exports)(module, setup.model, setup.seed, target)
    condition = str(getattr(run.scenario.stages[stage], "target", ""))
    description["target"] = {"stage": stage, "condition": condition}
    example = make_example(
        "Score items with this folder",
        opener="ExportedClicks",
        answer="probabilities = model.score(model.items, history=history, user=asked.user)",
        shown=_SHOWN,
        counted="questions",
        packages=spec.packages,
    )
    write_description(target, description, example)


class ExportedClicks(ExportedModel):
    """A click model with its items, loaded from a folder that `nonet export` wrote.

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
        setup, target = open_setup(folder, description, makes_lists=False), description["target"]
        files = {path.name: path for path in (folder / "clicks").iterdir()}
        layers = {table: [map_layer(folder / "rows" / table)] for table in setup.tables}
        rows = MappedReader(description["version"], layers, setup.make_table_specs())
        self.engine = ClickEngine(folder / DENSE_WEIGHTS, files, rows, description["version"])
        corpus = Corpus.load({"sequences": str(folder / "sequences")})
        seq = corpus.seq
        joins = open_joins(
            folder, description["joins"], description["copied_stores"], stores or {}, setup.features
        )
        features = ClickRequestFeatures(
            corpus,
            UserHistories(corpus, journal=None, defaults=make_missing_values(seq.columns)),
            window=setup.history,
            width=1,
            joins=joins or None,
            vocabulary=read_vocabulary(description),
            where=description.get("where"),
            labels=EventLabeller(target["stage"], target["condition"], list(seq.columns), seq.event_names),
            features=tuple(setup.features),
        )
        super().__init__(corpus, features)

    def score(
        self,
        items: Sequence[int | str],
        *,
        user: int | str | None = None,
        history: Sequence[Mapping[str, Any] | int | str] = (),
        time: int | str | None = None,
        values: Mapping[str, Any] | None = None,
        task: str = "",
    ) -> list[float | None]:
        """Return the probability of a click on each item, or of another task of the model; None for unknown items.

        Args:
            items: Ids of the items.
            user: The user's id.
            history: The user's events: item ids, newest last, or {"item", "time", "event", "values"} each. An event is liked or
                not by the run's target condition on its values, and neither without them.
            time: Time of the request in the unit of the run's log or as ISO text, by default the present. Events
                that are not older are left out.
            values: Values of the request by column of the data.
            task: The task, "" for the target.

        Raises:
            ConfigError: An argument is wrong.
        """
        tasks = self.engine.scorer.model.setup.tasks
        if task not in tasks:
            raise ConfigError(f"task: the model does not predict {task!r}; tasks: {join_names(tasks[1:])}")
        scores: dict[str, float] = {}
        for start in range(0, len(items), _ITEMS_PER_QUESTION):
            prepared = self._features.prepare_score_question(
                user,
                list(history),
                items[start : start + _ITEMS_PER_QUESTION],
                time=time,
                values=values,
            )
            answer = self.engine.answer([self._read_joined_columns(prepared)])[0]
            ids = map(str, self._features.items.get_ids(answer.item))
            probabilities = answer.tasks[task] if task else answer.score
            scores |= dict(zip(ids, probabilities.tolist(), strict=True))
        return [scores.get(str(item)) for item in items]
