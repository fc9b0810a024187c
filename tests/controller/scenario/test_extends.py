"""`extends:` at the top of a scenario."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from nonet import yaml
from nonet.controller.record import RunFolder
from nonet.controller.scenario.document.extends import read_chain
from nonet.controller.scenario.scenario import load_scenario, make_schema, read_document, to_document
from nonet.controller.setup.own_files import keep_copies, list_named_files, read_copies
from nonet.deploy.run.jobs import submit_job
from nonet.deploy.run.planning import describe_origins, summarise_origins
from nonet.deploy.verbs.listing import copy_scenario
from nonet.errors import ConfigError

ROOT = Path(__file__).parents[3]


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.yaml"


def refuse(path, *changes):
    with pytest.raises(ConfigError) as caught:
        load_scenario(path, list(changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_maps_are_merged_lists_and_scalars_are_replaced_and_null_removes_a_key(tmp_path):
    path = write(
        tmp_path,
        child="extends: parent.yaml\na: {x: 2, l: [3]}\nb: null\nc: {z: 1}\nd:\n",
        parent="a: {x: 1, y: 1, l: [1, 2]}\nb: {q: 1}\nc: 4\ne: {r: {s: 1}}\n",
    )
    assert read_chain(path).document == {
        "a": {"x": 2, "y": 1, "l": [3]},
        "c": {"z": 1},
        "e": {"r": {"s": 1}},
        "d": None,
    }


def test_a_scenario_extends_a_shipped_one_through_another_file_with_changes_on_top(tmp_path):
    path = write(
        tmp_path,
        child="extends: parent.yaml\nstages: {rl: {steps: 5, rewards: {novelty: null}}}\n",
        parent="extends: quickstart\nname: mine\nseed: 3\nstages: {rl: {steps: 7, users: 32}}\n",
    )
    scenario, folder = load_scenario(path, ["stages.rl.users=16"])
    shipped, _ = load_scenario("quickstart")
    assert (scenario.name, scenario.seed, folder) == ("mine", 3, tmp_path)
    rl = scenario.stages["rl"]
    assert (rl.steps, rl.users, list(rl.rewards)) == (5, 16, ["hit"])
    assert to_document(scenario)["stages"]["pretrain"] == to_document(shipped)["stages"]["pretrain"]


def test_a_stored_scenario_is_merged(tmp_path):
    path = write(tmp_path, child="extends: quickstart\nname: mine\n")
    scenario, _ = load_scenario(path)
    stored = write(tmp_path / "run", scenario=yaml.dump(to_document(scenario)))
    assert "extends" not in yaml.read(stored)
    assert load_scenario(stored)[0] == scenario


def test_each_value_has_the_file_and_line_that_it_is_written_in(tmp_path):
    path = write(
        tmp_path,
        child="# A child.\nextends: base/parent.yaml\nseed: 3\ndata:\n  keep: null\n  history: 20\n",
    )
    write(tmp_path / "base", parent="extends: quickstart\nname: mine\n\nevaluate:\n  <<: {width: 32}\n")
    read = read_document(path, ["stages.rl.steps=9", "tokenizer={use: rq_kmeans, levels: 2}"])
    origins = {".".join(keys): origin for keys, origin in read.origins.items()}
    assert origins["seed"] == "child.yaml:3"
    assert origins["data.history"] == "child.yaml:6"
    assert origins["name"] == "base/parent.yaml:2"
    assert origins["evaluate.width"] == "base/parent.yaml:5"
    assert origins["stages.rl.users"] == "quickstart:24"
    assert origins["stages.rl.steps"] == origins["tokenizer"] == "--set"
    assert not any(key.startswith(("data.keep", "tokenizer.")) for key in origins)


def test_plan_lists_and_counts_origins_and_hides_values_of_environments(tmp_path):
    path = write(
        tmp_path,
        child="extends: quickstart\nseed: 3\npools: {cpu2: {env: {vars: {KEY: hunter2}}}}\n",
    )
    lines = describe_origins(str(path), ["evaluate.width=32"], as_json=False).splitlines()
    assert lines[0].split() == ["name:", "quickstart", "quickstart:2"]
    assert ["seed:", "3", "child.yaml:2"] in [line.split() for line in lines]
    assert ["evaluate.width:", "32", "--set"] in [line.split() for line in lines]
    assert any("pools.cpu2.env.vars.KEY" in line for line in lines)
    assert "hunter2" not in "\n".join(lines)
    found = json.loads(describe_origins(str(path), None, as_json=True))
    assert found["origins"]["seed"] == "child.yaml:2"
    assert found["files"][0] == str(path)
    assert found["files"][1].endswith("quickstart.yaml")
    summary = summarise_origins(str(path), ["evaluate.width=32"])
    assert "2 in child.yaml, 1 in --set (--origins lists them)" in summary
    assert summarise_origins("quickstart", None) == ""


def test_keys_that_are_numbers_have_origins_too(tmp_path):
    mine = "{use: 'mine.py:score', prices: {5: 1.5}}"
    path = write(tmp_path, child=f"extends: quickstart\nstages: {{rl: {{rewards: {{mine: {mine}}}}}}}\n")
    lines = describe_origins(str(path), None, as_json=False).splitlines()
    (line,) = [line for line in lines if "stages.rl.rewards.mine.prices.5: 1.5" in line]
    assert line.split()[-1] == "child.yaml:2"


def test_relative_paths_of_a_parent_start_from_its_own_folder(tmp_path):
    base = tmp_path / "base"
    (base / "tables").mkdir(parents=True)
    (base / "tables" / "day.parquet").touch()
    (base / "mine.py").write_text("def score(item): return item\n")
    write(
        base,
        parent="""extends: quickstart
data:
  interactions: "tables/*.parquet"
  items: missing.parquet
  settings: tables
  join: {item: {use: "lmdb:tables"}, user: {use: "redis://cache-1:6379/users"}}
  sequences: {use: "lmdb:later"}
stages: {rl: {rewards: {mine: {use: "mine.py:score", weight: 1, word: tables, folder: ./tables}}}}
""",
    )
    child = write(tmp_path, child="extends: base/parent.yaml\n")
    elsewhere = write(tmp_path / "other", child="extends: ../base/parent.yaml\n")
    for path, prefix in ((child, "base/"), (elsewhere, f"{base}/")):
        document = read_chain(path).document
        mine = document["stages"]["rl"]["rewards"]["mine"]
        assert document["data"]["interactions"] == f"{prefix}tables/*.parquet"
        assert document["data"]["items"] == f"{prefix}missing.parquet"
        assert document["data"]["join"]["item"]["use"] == f"lmdb:{prefix}tables"
        assert document["data"]["join"]["user"]["use"] == "redis://cache-1:6379/users"
        assert document["data"]["sequences"]["use"] == f"lmdb:{prefix}later"
        assert document["data"]["settings"] == mine["word"] == "tables"  # words that happen to be folders
        assert (mine["use"], mine["folder"]) == (f"{prefix}mine.py:score", f"{prefix}tables")
        assert document["stages"]["rl"]["rewards"]["novelty"]["use"].endswith(
            "deploy/scenarios/rewards/novelty.py"
        )
    own = read_chain(base / "parent.yaml").document
    assert own["data"]["interactions"] == "tables/*.parquet"


def test_a_run_keeps_copies_of_the_files_that_a_parent_names(tmp_path):
    child = write(tmp_path / "a", child="extends: ../b/parent.yaml\n")
    write(
        tmp_path / "b",
        parent="extends: quickstart\nstages: {rl: {rewards: {mine: {use: 'mine.py:score'}}}}\n",
    )
    (tmp_path / "b" / "mine.py").write_text("def score(item): return item\n")
    scenario, folder = load_scenario(child)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    keep_copies(scenario, folder, run)
    run.scenario.write_text(yaml.dump(to_document(scenario)))
    (tmp_path / "b" / "mine.py").unlink()
    copies = read_copies(run)
    assert all(
        copies.resolve_path(name).is_file() for name in list_named_files(load_scenario(run.scenario)[0])
    )


def test_tables_of_a_shipped_scenario_that_the_user_provides_start_from_the_child(tmp_path):
    child = write(tmp_path, child="extends: amazon-sid\n")
    assert (
        read_chain(child).document["data"]["interactions"]
        == (read_chain(load_scenario("amazon-sid")[1] / "amazon-sid.yaml").document["data"]["interactions"])
    )


def test_what_cannot_be_extended_is_refused_in_one_line(tmp_path):
    path = write(tmp_path, a="extends: b.yaml\n", b="extends: c.yaml\n", c="extends: b.yaml\n")
    assert "b.yaml -> c.yaml -> b.yaml extend each other" in refuse(path)
    assert "a.yaml -> a.yaml extend each other" in refuse(write(tmp_path, a="extends: a.yaml\n"))
    unknown = refuse(write(tmp_path, a="extends: quikstart\n"))
    assert "a.yaml: extends: there is no scenario 'quikstart' (did you mean 'quickstart'?)" in unknown
    assert "a.yaml: extends: there is no scenario file" in refuse(write(tmp_path, a="extends: z.yaml\n"))
    assert "wanted the name of a shipped scenario" in refuse(write(tmp_path, a="extends: [quickstart]\n"))
    assert "b.yaml: wanted a map, as a.yaml extends it" in refuse(
        write(tmp_path, a="extends: b.yaml\n", b="- 1\n")
    )
    path = write(tmp_path, a="extends: quickstart\n")
    assert "write `extends` into a scenario's file" in refuse(path, "extends=ctr")
    stored = write(tmp_path / "run", scenario="name: x\n")
    (stored.parent / "sources.json").write_text("[]")
    assert "stored scenario of a run" in refuse(write(tmp_path, a="extends: run/scenario.yaml\n"))


def test_the_error_of_a_key_names_the_file_in_the_chain_that_it_is_written_in(tmp_path):
    path = write(
        tmp_path,
        child="extends: parent.yaml\nseed: 3\n",
        parent="extends: quickstart\ndata:\n  histry: 20\n",
    )
    assert refuse(path).startswith("parent.yaml:3: data.histry: unknown key (did you mean 'history'?)")
    path = write(tmp_path, child="extends: quickstart\nseed: -3\n")
    assert refuse(path).startswith("child.yaml:2: seed: ")
    assert refuse(path, "seed=1", "evaluate.widht=3").startswith("--set: evaluate.widht: unknown key")


def test_the_files_that_a_scenario_extends_are_copied_with_it(tmp_path):
    path = write(tmp_path / "a", child="extends: parent.yaml\n", parent="extends: quickstart\n")
    copies = copy_scenario(str(path), tmp_path / "b")
    assert sorted(copy.name for copy in copies) == ["child.yaml", "parent.yaml"]
    assert load_scenario(tmp_path / "b" / "child.yaml")[0] == load_scenario(path)[0]
    outside = write(tmp_path / "c", child="extends: ../a/parent.yaml\n")
    with pytest.raises(ConfigError, match="is outside of its folder"):
        copy_scenario(str(outside), tmp_path / "d")


def test_a_copy_of_a_shipped_scenario_has_all_python_files_that_it_names_itself(tmp_path):
    copies = copy_scenario("nightly-feed", tmp_path / "whole")
    assert {path.name for path in copies} == {"nightly-feed.yaml", "rewards.py", "steps.py"}
    copies = copy_scenario("nightly-feed-laptop", tmp_path / "child")
    assert {path.name for path in copies} == {"nightly-feed-laptop.yaml", "steps.py"}
    scenario, folder = load_scenario(tmp_path / "child" / "nightly-feed-laptop.yaml")
    assert all((folder / name).is_file() for name in list_named_files(scenario))


def test_the_schema_has_the_key_and_does_not_require_what_the_extended_scenario_has():
    schema = make_schema()
    assert next(iter(schema["properties"])) == "extends"
    assert {"required": ["extends"]} in schema["anyOf"]
    assert "required" not in schema


def test_a_job_is_not_submitted_without_the_files_that_its_scenario_extends(tmp_path):
    write(tmp_path / "a", parent="extends: quickstart\n")
    path = write(tmp_path / "b", child="extends: ../a/parent.yaml\n")
    with pytest.raises(ConfigError, match=r"extends: .*parent\.yaml is outside of .*move it there"):
        submit_job(str(path), "http://127.0.0.1:1", [])


@pytest.mark.parametrize(
    "path",
    [
        *sorted((ROOT / "deploy/scenarios").glob("*.yaml")),
        *sorted(path for path in (ROOT / "examples").rglob("*.yaml") if "stages:" in path.read_text()),
    ],
    ids=lambda path: path.stem,
)
def test_an_editor_that_checks_with_the_schema_accepts_every_shipped_scenario(path):
    document = yaml.read(path)
    editor = jsonschema.Draft202012Validator(make_schema())
    assert [error.message for error in editor.iter_errors(document)] == []
    document["stages"] = {"pretrain": {"epochs": 3, "epoch": 1}}
    assert [error.path[0] for error in editor.iter_errors(document)] == ["stages"]


def test_the_schema_accepts_units_and_a_value_in_place_of_a_section():
    editor = jsonschema.Draft202012Validator(make_schema())
    data = {"interactions": "a.parquet", "labels": {"path": "b.parquet", "within": "7d"}}
    document = {"name": "a", "data": data, "storage": "s3://b/runs", "stages": {}, "tracking": {"mlflow": {}}}
    assert list(editor.iter_errors(document)) == []
