"""`nonet export RUN DIR`: a folder from which recommendations can be made: weights, semantic ids, trie, rows and counts.

Programs that load the folder (`Exported`) need neither Ray nor the run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nonet.atomic import make_folder, write_whole
from nonet.deploy.opened import select_joins
from nonet.deploy.serving.offline.exported import (
    DENSE_WEIGHTS,
    FORMAT,
    TRANSFORMERS_FOLDER,
)
from nonet.deploy.serving.offline.exported_stores import write_joins
from nonet.deploy.serving.offline.exporters import EXPORTERS, VersionToExport
from nonet.errors import ConfigError
from nonet.models import MODELS, ModelSpec
from nonet.models.generation import Corpus, get_memory_file_name
from nonet.models.inference import find_default_values
from nonet.plugins import load_heavy
from nonet.trust import approve_code, check_folder

_EXPORTED_SETTINGS = ("seed", "history", "model", "tables", "features", "memory")  # fields of `RunSetup`
# Options of a model whose spec opens the exported folder by its own options.
_OPENED_OPTIONS = ("use", "memory", "memory_signals")
# `make_example` replaces the words in capitals.
_EXAMPLE = '''"""PURPOSE. It needs the packages PACKAGES and nonet, and no Ray."""

import argparse
import sys
from pathlib import Path

from nonet.deploy.serving.offline import OPENER
from nonet.errors import NonetError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("items", nargs="*", help="ids of a history, oldest first; by default those of three items")
parser.add_argument("--user", help="the user's id")
parser.add_argument("--store", action="append", default=[], metavar="NAME=ADDRESS", help="another store of a join")
asked = parser.parse_args()
if any("=" not in store for store in asked.store):
    parser.error("argument --store: give NAME=ADDRESS")
try:
    model = OPENER(Path(__file__).parent, dict(store.split("=", 1) for store in asked.store))
    history = asked.items or model.items[:3]
    ANSWER
except NonetError as error:
    sys.exit(f"{parser.prog}: {error}")
print("after", ", ".join(model.titles(history)) or "no item of the catalogue")
for item in model.unknown:
    print(f"no item has the id {item}")
SHOWN
for join, count in model.missing.items():
    print(f"join {join}: columns missing in {count} COUNTED; --store {join}=ADDRESS names another store")
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
    check_folder(
        exported.run.folder.path, exported.run.folder.id
    )  # the export has this code, and is approved
    make_folder(target)
    try:
        write(exported, target)
    except BaseException:
        shutil.rmtree(target)  # a part of an export is of no use
        raise
    with suppress(OSError):  # a home that cannot be written: opening the export asks for --trust later
        approve_code(target)
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
    spec = MODELS.get(exported.run.setup.model["use"])
    if spec.export_folder:
        load_heavy(spec.export_folder)(exported, target)
        return
    corpus = exported.corpus
    description = write_shared_parts(exported, target)
    for name, path in exported.counts.items():
        make_folder(target / "transitions")
        shutil.copyfile(path, target / "transitions" / get_memory_file_name(name))
    for kind in ("sids", "catalogue"):
        shutil.copytree(corpus.folders[kind], target / kind)
    description["setup"]["model"] = _write_model(exported, spec, target)
    description["usual"] = {name: value.item() for name, value in find_default_values(corpus.seq).items()}
    description["width"] = exported.run.scenario.evaluate.width
    example = make_example(
        "Recommend from this folder",
        opener="Exported",
        answer="answer = model.recommend(history, k=10, user=asked.user)",
        shown='for item, title, score in answer:\n    print(f"{score:8.3f}  {item}  {title}")',
        counted="of 1 answers",
        packages=spec.packages,
    )
    write_description(target, description, example)


def make_example(purpose: str, *, opener: str, answer: str, shown: str, counted: str, packages: str) -> str:
    """Return the program example.py of an export.

    Args:
        purpose: What the program does, for its first line.
        opener: Name of the class that opens the folder.
        answer: The statement that asks `model` with `history`.
        shown: The statements that print the answer.
        counted: What is counted if the store of a join is absent.
        packages: The packages that it needs besides nonet.
    """
    parts = {"PURPOSE": purpose, "OPENER": opener, "ANSWER": answer, "SHOWN": shown, "COUNTED": counted}
    parts["PACKAGES"] = packages
    example = _EXAMPLE
    for word, part in parts.items():
        example = example.replace(word, part)
    return example


def write_shared_parts(exported: VersionToExport, target: Path) -> dict[str, Any]:
    """Write what exports of all kinds of models have: sparse rows, items, and copies of joined stores.

    Args:
        exported: The version to write.
        target: The folder of the export.

    Returns:
        The description of the parts, for `write_description`.
    """
    run, corpus = exported.run, exported.corpus
    for table, arrays in exported.merge_rows().items():
        make_folder(target / "rows" / table)
        for name, array in arrays.items():
            np.save(target / "rows" / table / f"{name}.npy", array)
    # Without users: an export has no events of them, and the keys of their rows follow from their ids.
    corpus.seq.slice_users(0, 0).save(target / "sequences")
    shutil.copyfile(
        Path(corpus.folders["sequences"]) / "items.parquet", target / "sequences" / "items.parquet"
    )
    joins = select_joins(run.setup.joins, run.setup.features)
    described_joins, copied_stores = write_joins(joins, corpus.item_id, target)
    return {
        "format": FORMAT,
        "run": run.folder.id,
        "version": exported.version,
        "setup": {name: value for name, value in asdict(run.setup).items() if name in _EXPORTED_SETTINGS},
        "vocabulary": run.vocabulary.to_dict(),
        "where": run.scenario.data.where,
        "joins": described_joins,
        "copied_stores": copied_stores,
        "withdrawn": list(run.withdrawn),
    }


def write_description(target: Path, description: Mapping[str, Any], example: str) -> None:
    """Write example.py and export.json into an export whose other files are complete.

    Args:
        target: The folder of the export.
        description: The contents of export.json, to which the sizes of the files are added.
        example: The program.
    """
    paths = sorted(path for path in target.rglob("*") if path.is_file())
    sizes = {path.relative_to(target).as_posix(): path.stat().st_size for path in paths}
    (target / "example.py").write_text(example, encoding="utf-8")
    # Written last, because a folder without it is not an export.
    write_whole(target / "export.json", json.dumps({**description, "files": sizes}, indent=1).encode())


def _write_model(exported: VersionToExport, spec: ModelSpec, target: Path) -> Mapping[str, Any]:
    """Write the dense weights once, in the format of another library if the model can be opened from it.

    Returns:
        The configuration with which the model is built.
    """
    config = exported.run.setup.model
    if spec.exports != "":
        folder = target / TRANSFORMERS_FOLDER
        make_folder(folder)
        load_heavy(spec.exports)(exported.build_model(), config, exported.run.setup.seed, folder)
        _write_items(exported.corpus, folder / "items.parquet")
    if spec.imports != "":
        return {name: config[name] for name in _OPENED_OPTIONS if name in config}
    shutil.copyfile(exported.dense, target / DENSE_WEIGHTS)
    return config


def _write_items(corpus: Corpus, path: Path) -> None:
    """Write the id, the title if there is one, and the codes of every item that can be recommended."""
    is_listed = np.asarray(corpus.trie.leaf_of_item) >= 0
    names = [name for name in ("item_id", "title") if name in corpus.items.column_names]
    codes = pa.FixedSizeListArray.from_arrays(pa.array(corpus.sids.ravel()), corpus.sids.shape[1])
    table = corpus.items.select(names).append_column("codes", codes)
    pq.write_table(table.filter(pa.array(is_listed)), path)
