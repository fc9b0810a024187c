"""Exports of every kind of model open without the run and its other folders, and give the lists of the server."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from backbones import folder_of
from safetensors.torch import load_file, save_file
from served_run import TrainedRun

from nonet.deploy.opened import Refused, RequestFeatures
from nonet.deploy.serving.offline import Exported, ExportedClicks, export_run
from nonet.errors import ConfigError, DataError
from nonet.models.inference import InferenceEngine

TOLERANCE = 1e-5  # rounding of merged matrices and of batches of other sizes
BF16_TOLERANCE = 0.05  # LoRA that is merged into weights of 8 significant bits
HF = {"use": "hf", "path": "backbone"}
KINDS = {
    "decoder": ({}, True, True),
    "decoder without tables and memory": ({}, False, False),
    "hstu": ({"block": "hstu"}, False, True),
    "hf": (HF, True, True),
    "hf with LoRA": ({**HF, "lora": {"rank": 2}, "prompt": "films liked : {history} next"}, True, True),
    "hf without tables": ({**HF, "tied": True}, False, False),
    "hf of bf16": ({**HF, "precision": "bf16", "lora": {"rank": 2}}, False, False),
}

FAST = ("hf with LoRA",)
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "hugging-face.md"


def make_run(folder, model, memory=False, tables=True):
    """Train a few steps of a model of this kind, whose backbone, if it has one, is in folder/backbone."""
    model = dict(model)
    if model.get("path") is not None:
        model["path"] = folder_of(folder / "backbone")

    def change(scenario):
        body = yaml.safe_load(scenario.read_text())
        body["model"] = model if model.get("use") else body["model"] | model
        body["model"] |= {"memory": "on"} if memory else {}
        if not tables:
            del body["sparse"]
        scenario.write_text(yaml.safe_dump(body))

    (folder / "run").mkdir()
    run = TrainedRun(folder / "run", memory=memory, edit=change)
    run.commit(4)
    return run


def ask_run(run, *arguments, **options):
    """Return (item, score) of the list that the run's features and engine give, as a server does."""
    opened = run.open()
    engine = InferenceEngine(opened.load_recommender(opened.registry.read_version(1)), 1)
    features = RequestFeatures.from_run(opened, posts=False)
    answer = engine.answer([features.make_list_question(*arguments, **options).question])[0]
    return list(zip(features.items.get_ids(answer.item), answer.score.tolist(), strict=True))


def run_example(folder, capsys, monkeypatch, *words):
    """Run example.py of an export in this process, and return what it prints."""
    monkeypatch.setattr(sys, "argv", [str(folder / "example.py"), *words])
    runpy.run_path(str(folder / "example.py"))
    return capsys.readouterr().out


HISTORY = [{"item": 1001 + i, "time": 3600 * i, "values": {"rating": 4.5}} for i in range(3)]


@pytest.mark.parametrize(
    "kind",
    [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_an_export_needs_nothing_else_and_gives_the_lists_of_the_server(kind, tmp_path, capsys, monkeypatch):
    model, tables, memory = KINDS[kind]
    run = make_run(tmp_path, model, memory, tables)
    export_run(str(run.folder.path), tmp_path / "out")
    asked = [("130", HISTORY, 5), (None, [1003, 1004], 5)]
    expected = [ask_run(run, *each, time=50_000) for each in asked]
    shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    for name in ("run", "backbone"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    exported = Exported(tmp_path / "elsewhere")
    tolerance = BF16_TOLERANCE if "bf16" in kind else TOLERANCE
    for (user, history, k), theirs in zip(asked, expected, strict=True):
        listed = exported.recommend(history, k, user=user, time=50_000)
        assert [score for _, _, score in listed] == pytest.approx([s for _, s in theirs], abs=tolerance)
        if tolerance == TOLERANCE:
            assert [item for item, _, _ in listed] == [item for item, _ in theirs]
    assert len(run_example(tmp_path / "elsewhere", capsys, monkeypatch, "1001").splitlines()) == 11
    shown = run_example(tmp_path / "elsewhere", capsys, monkeypatch, "1001", "99999").splitlines()
    assert len(shown) == 12
    assert shown[1] == "no item has the id 99999"
    assert str(tmp_path) not in (tmp_path / "elsewhere" / "export.json").read_text()
    weights = [path.name for path in (tmp_path / "elsewhere").rglob("*model*.safetensors")]
    assert weights == ["model.safetensors"]


def test_an_export_refuses_the_events_that_the_run_leaves_out(tmp_path):
    model, tables, memory = KINDS[FAST[0]]
    run = make_run(tmp_path, model, memory, tables)
    export_run(str(run.folder.path), tmp_path / "out")
    file = tmp_path / "out" / "export.json"
    description = json.loads(file.read_text())
    assert description["where"] is None
    file.write_text(json.dumps(description | {"where": "rating >= 4"}))
    exported = Exported(tmp_path / "out")
    assert exported.recommend(HISTORY, 3)
    with pytest.raises(Refused, match=r"data.where: .* leaves this event out"):
        exported.recommend([HISTORY[0] | {"values": {"rating": 1}}], 3)


def test_the_page_says_how_transformers_alone_gives_the_same_list(tmp_path):
    options = {"lora": {"rank": 2}, "prompt": "films liked : {history} next"}
    run = make_run(tmp_path, HF | options, tables=False)
    export_run(str(run.folder.path), tmp_path / "out")
    others = tmp_path / "out" / "transformers" / "nonet.safetensors"
    weights = load_file(others)  # of the rating, the kind and the time of an event
    save_file({name: torch.zeros_like(weight) for name, weight in weights.items()}, others)
    block = re.search(r'```python title="ask.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1].replace("DIR", str(tmp_path / "out")), names)
    exported = Exported(tmp_path / "out")
    expected = exported.recommend(names["history"], 5)
    scores = {item: names["scores"][item] for item, _, _ in expected}
    assert scores == pytest.approx(
        {item: score for item, _, score in expected}, abs=1e-4
    )  # two beam searches
    unseen = [item for item in names["listed"] if item not in names["history"]]
    assert unseen[:5] == [item for item, _, _ in expected]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder")
    run = make_run(folder, {})
    export_run(str(run.folder.path), folder / "out")
    return folder / "out"


@pytest.mark.parametrize("absent", ["rows", "rows/item/key.npy", "model.safetensors", "sids/sids.parquet"])
def test_an_export_without_one_of_its_parts_is_refused_in_one_line(decoder, tmp_path, absent):
    out = shutil.copytree(decoder, tmp_path / "out")
    shutil.move(out / absent, tmp_path / "lost")
    with pytest.raises(
        DataError,
        match=rf"is incomplete: it has no {absent}.*; copy the whole folder, or export the run again$",
    ):
        Exported(out)


def test_a_file_that_was_not_copied_completely_is_named(decoder, tmp_path):
    out = shutil.copytree(decoder, tmp_path / "out")
    (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:100])
    with pytest.raises(DataError, match=r"is incomplete: model.safetensors has 100 of \d+ bytes"):
        Exported(out)


def test_other_folders_and_exports_of_newer_versions_are_refused(decoder, tmp_path):
    out = shutil.copytree(decoder, tmp_path / "out")
    description = json.loads((out / "export.json").read_text())
    (out / "export.json").write_text(json.dumps(description | {"format": 99}))
    with pytest.raises(DataError, match="format 99, and this version of Nonet reads 1 to 3"):
        Exported(out)
    with pytest.raises(DataError, match="use a folder that `nonet export RUN DIR` wrote"):
        Exported(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="has no join 'item'; its joins: none"):
        Exported(decoder, {"item": "redis://127.0.0.1:1/none"})
    with pytest.raises(
        DataError, match=r"has a recommender; open it with nonet.deploy.serving.offline.Exported$"
    ):
        ExportedClicks(decoder)
    with pytest.raises(ConfigError, match="an event of the history has no item"):
        Exported(decoder).recommend([{"time": 3}])


def test_the_example_program_refuses_wrong_arguments_in_one_line(decoder, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="has no join 'mine'"):
        run_example(decoder, capsys, monkeypatch, "--store", "mine=lmdb:nowhere")
    with pytest.raises(SystemExit, match="'nothing' can be no id of this run"):
        run_example(decoder, capsys, monkeypatch, "nothing")
    assert run_example(decoder, capsys, monkeypatch, "9").startswith("after no item of the catalogue\n")


def test_an_export_that_fails_leaves_no_folder(decoder, tmp_path):
    (tmp_path / "own.py").write_text(
        "from nonet.plug import Exporter\nBAD = Exporter(lambda version, folder: 1 / 0)"
    )
    with pytest.raises(ZeroDivisionError):
        export_run(str(decoder.parent / "run" / "run"), tmp_path / "out", form=f"{tmp_path}/own.py:BAD")
    assert not (tmp_path / "out").exists()


def test_an_export_takes_times_and_columns_as_the_files_of_the_run_have_them(decoder, tmp_path):
    out = shutil.copytree(decoder, tmp_path / "out")
    description = json.loads((out / "export.json").read_text())
    assert description["vocabulary"]["time_unit"] == "s"
    description["vocabulary"] |= {"time_unit": "ms", "columns": {"rating": "stars"}}
    (out / "export.json").write_text(json.dumps(description))
    history = [{"item": 1001, "time": 1_764_000_000, "values": {"rating": 4.0}}, {"item": 1002}]
    in_ms = [{"item": 1001, "time": 1_764_000_000_000, "values": {"stars": 4.0}}, {"item": 1002}]
    expected = Exported(decoder).recommend(history, 5, user=130, time=1_764_009_000)
    assert Exported(out).recommend(in_ms, 5, user="130", time="2025-11-24T18:30:00Z") == expected
    with pytest.raises(ConfigError, match="time"):
        Exported(out).recommend([{"item": 1001, "time": -5}])
