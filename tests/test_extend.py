"""docs/how-to/extend.md: its code in one file beside a scenario is a run with six kinds of plug-ins."""

from __future__ import annotations

import io
import json
import re
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests_ring import make_ring
from typer.testing import CliRunner

from nonet.controller.record.checkpoint import Checkpoints, read_manifest
from nonet.deploy.cli import app
from nonet.deploy.run import api
from nonet.deploy.run.panel import Panel
from nonet.deploy.serving.offline import export_run

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
MOST_LINES = 30


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_each_section_shows_its_kind_in_under_thirty_lines():
    code = blocks("python")
    assert len(code) == 12
    assert max(len([line for line in block.splitlines() if line.strip()]) for block in code) < MOST_LINES


@pytest.fixture(scope="module")
def finished(ray_local, tmp_path_factory):
    folder = make_ring(tmp_path_factory.mktemp("own"))
    (folder / "mine.py").write_text("\n".join(blocks("python")))
    (folder / "mine.yaml").write_text(blocks("yaml")[0])
    return api.run(
        api.scenario(folder / "mine.yaml", []), run_dir=folder / "run", panel=Panel(io.StringIO(), live=False)
    )


def records(finished, stage):
    lines = (finished.folder.path / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["stage"] == stage]


@pytest.mark.timeout(300)
def test_a_run_has_an_algorithm_a_model_an_engine_a_source_a_role_and_a_stage_of_its_own(finished):
    text = (finished.folder.path / "sources.json").read_text()
    assert "mine.py" in text
    noted = [r["value"] for r in records(finished, "pretrain") if r["name"] == "noted"]
    assert noted == [101, 102]  # the stage's loop told the role of every other step
    losses = [r["value"] for r in records(finished, "pretrain") if r["name"] == "loss"]
    assert len(losses) == 3  # of six, for the source has half of the users
    assert losses[-1] < losses[0]
    assert len([r["value"] for r in records(finished, "pretrain") if r["name"] == "l2"]) == 3  # the learner's
    kl = [r["value"] for r in records(finished, "rl") if r["name"] == "kl"]
    assert kl == [0.0, 0.0]  # the algorithm keeps no reference
    path, _ = Checkpoints(finished.folder.checkpoints).find_newest()
    names = set(read_manifest(path).files)
    assert not any(name.startswith("reference/") for name in names)
    assert json.loads((path / "dense" / "optimizer.json").read_text())[0]["momentum"] == 0.8  # the engine's
    assert not any(
        "blocks." in name for name in load_file(path / "dense" / "model.safetensors")
    )  # the model's


def test_a_metric_of_its_own_is_in_the_report(finished):
    report = json.loads((finished.folder.path / "report.json").read_text())
    text = json.dumps(report)
    assert "mine.py:HIT@3" in text
    assert "mine.py:REPEATS@2" in text


def test_a_tokenizer_of_its_own_gives_the_semantic_ids(finished):
    facts = json.loads((finished.folder.path / "report.json").read_text())["tokenizer"]
    assert facts["codes"][:2] == [5, 5]


def test_an_exporter_of_its_own_writes_a_version(finished, tmp_path):
    export_run(
        str(finished.folder.path), tmp_path / "out", form=f"{finished.folder.path.parent}/mine.py:SIZES"
    )
    assert json.loads((tmp_path / "out" / "sizes.json").read_text())


def test_a_verb_of_its_own_is_a_command(finished, monkeypatch):
    point = EntryPoint("sizes", f"{finished.folder.path.parent}/mine.py:sizes", "nonet.verbs")
    monkeypatch.setattr("nonet.contracts._read_entry_points", lambda: EntryPoints([point]))
    done = CliRunner().invoke(app, ["sizes", str(finished.folder.path), "--json"])
    assert done.exit_code == 0, done.output
    assert all(size > 0 for size in json.loads(done.output).values())


def test_plug_ins_import_from_one_module():
    imports = re.findall(r"^(?:from|import) (nonet[\w.]*)", "\n".join(blocks("python")), re.MULTILINE)
    assert set(imports) == {"nonet.plug"}
