"""`nonet evaluate`, `nonet report --compare` and `nonet run --seeds` as they are typed; mistakes are one line each."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from ring_world import Ring
from run_folders import commit, folder_of

from nonet import trust, yaml
from nonet.controller.scenario import load_scenario
from nonet.controller.setup import ReadingFacts
from nonet.deploy.run import api


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    return Ring(tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="module")
def events(ring):
    return ring.corpus().seq.count_events()["test"]


@pytest.fixture(scope="module")
def run(ring, events, tmp_path_factory):
    """Make a run of one untrained checkpoint and its ranks."""
    path = tmp_path_factory.mktemp("runs") / "first"
    run, world = folder_of(ring, path, pretrain=np.zeros(events, np.int64)), ring.world()
    commit(run, world)
    return run


def test_evaluate_prints_a_table_of_the_metrics_that_are_asked_for(run, typed):
    code, out, _ = typed("evaluate", run.path, "--metrics", "recall@3, mrr@5", "--stage", "pretrain")
    assert code == 0
    assert "recall@3" in out
    assert "mrr@5" in out
    assert [line.split()[0] for line in out.splitlines()[3:]] == [
        "popularity",
        "transition_counter",
        "attribute_counter",
        "pretrain",
    ]
    answer = json.loads(typed("evaluate", run.path, "--json")[1])
    assert set(answer["lists"]) == set(answer["subjects"])


def test_other_users_keep_their_ids_even_where_the_items_ids_are_typed_otherwise(run, ring, typed, tmp_path):
    table = pq.read_table(ring.scenario.parent / "interactions.parquet")
    place = table.column_names.index("item_id")
    table = table.set_column(place, "item_id", table["item_id"].cast("string"))
    pq.write_table(table, tmp_path / "interactions.parquet")
    told = json.loads(typed("evaluate", run.path, "--data", tmp_path, "--json")[1])
    assert told["data"]["dropped_events"] == 0
    own = json.loads(typed("evaluate", run.path, "--json")[1])
    assert told["subjects"]["pretrain"] == own["subjects"]["pretrain"]


def test_what_can_not_be_evaluated_is_one_line(run, ring, refused, tmp_path):
    assert "unknown metric 'hits@3'" in refused("evaluate", run.path, "--metrics", "recall@5,hits@3")
    assert "has no stage 'pretrian'; its stages: pretrain" in refused(
        "evaluate", run.path, "--stage", "pretrian"
    )
    assert "there is no run 'nowhere'" in refused("evaluate", "nowhere")
    assert "no such file" in refused("evaluate", run.path, "--data", tmp_path / "none.parquet")
    table = pq.read_table(ring.scenario.parent / "interactions.parquet")
    items = table["item_id"].to_numpy() + 10**6
    place = table.column_names.index("item_id")
    pq.write_table(table.set_column(place, "item_id", [items]), tmp_path / "interactions.parquet")
    assert "has an item that first knows" in refused("evaluate", run.path, "--data", tmp_path)


def test_report_compares_two_runs_in_a_table_or_as_json(run, ring, events, typed, tmp_path):
    other = folder_of(
        ring, tmp_path / "second", pretrain=np.full(events, 30), popularity=np.zeros(events, int)
    )
    code, out, _ = typed("report", run.path, "--compare", other.path)
    assert code == 0
    assert "a: first pretrain" in out
    assert "better in" in out
    words = ("report", run.path, "--compare", other.path, "--stage", "pretrain", "--with", "popularity")
    answer = json.loads(typed(*words, "--json")[1])
    assert answer["b"] == {"run": "second", "subject": "popularity"}
    assert all(row["diff"] == 0 for row in answer["metrics"].values())


def test_what_can_not_be_compared_is_one_line(run, refused, tmp_path_factory):
    other = Ring(tmp_path_factory.mktemp("other"), users=20)
    count = other.corpus().seq.count_events()["test"]
    elsewhere = folder_of(other, tmp_path_factory.mktemp("runs") / "other", pretrain=np.zeros(count, int))
    assert "were tested on different events" in refused("report", run.path, "--compare", elsewhere.path)
    assert "has no ranks of 'rl'; it has those of pretrain" in refused(
        "report", run.path, "--compare", run.path, "--with", "rl"
    )
    assert "--compare RUN" in refused("report", run.path, "--stage", "pretrain")


@pytest.fixture
def own_kinds(ring, events, tmp_path, monkeypatch):
    """A finished run with a tokenizer and a metric of its own, whose code writes a file when it is imported."""
    monkeypatch.setattr(trust, "_guarded", {})
    run = folder_of(ring, tmp_path / "own", pretrain=np.full(events, 30))
    scenario, _ = load_scenario(run.scenario)
    reading = ReadingFacts.from_scenario(scenario).model_copy(
        update={"metrics": ["recall@5", "own.py:HIT@3"]}
    )
    reading.store(run, run.read_facts() or {})
    (run.path / "sources").mkdir()
    (run.path / "sources/own.py").write_text(
        f"open({str(tmp_path / 'mark')!r}, 'w').close()\nSPEC = HIT = None\n"
    )
    (run.path / "sources.json").write_text(json.dumps([{"use": "own.py", "copy": "own.py", "sha256": ""}]))
    stored = yaml.read(run.scenario)
    stored["tokenizer"] = {"use": "own.py:SPEC"}
    run.scenario.write_text(json.dumps(stored))
    trust.approve_code(run.path)
    return run


def test_a_run_with_kinds_of_its_own_is_compared_without_importing_them(own_kinds, run, typed, tmp_path):
    code, out, err = typed("report", run.path, "--compare", own_kinds.path)
    assert code == 0, err
    assert "not compared, because code of the runs computes them: own.py:HIT@3" in out
    answer = json.loads(typed("report", own_kinds.path, "--compare", run.path, "--json")[1])
    assert set(answer["metrics"]) == {"recall@5"}
    assert not (tmp_path / "mark").exists()


def test_a_file_outside_of_a_run_that_its_facts_name_is_not_imported(own_kinds, run, typed, tmp_path):
    (tmp_path / "elsewhere.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    facts = own_kinds.read_facts()
    facts["reading"]["metrics"] = ["recall@5", f"{tmp_path / 'elsewhere.py'}:HIT@3"]
    own_kinds.write_facts(facts)
    assert typed("report", run.path, "--compare", own_kinds.path)[0] == 0
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"results": "subprocess:getoutput"},
            "reads results by code of its own (subprocess:getoutput)",
        ),
        ({"seed": "1"}, "results/tokenise.json, reading.seed: Input should be a valid integer"),
        ({"most_users": -1}, "results/tokenise.json, reading.most_users: Input should be greater than 0"),
        (
            {"results": "nonet.models.clicks:ClickResults", "target": "elsewhere"},
            "results/tokenise.json is damaged",
        ),
        ({"limits": {"report --compare": "has a kind that does not"}}, "own has a kind that does not"),
    ],
)
def test_what_a_run_says_of_its_kinds_is_not_believed_blindly(own_kinds, run, refused, changed, said):
    facts = own_kinds.read_facts()
    facts["reading"] |= changed
    own_kinds.write_facts(facts)
    assert said in refused("report", own_kinds.path, "--compare", run.path)


@pytest.fixture
def started(ring, events, monkeypatch):
    """Instead of running, leave a finished run whose targets all rank at the seed; which seeds began, which went on."""
    began: list[str] = []

    def finish(path, source):
        ranks = np.full(events, source.scenario.seed)
        made = folder_of(ring, path, pretrain=ranks, popularity=np.full(events, 30))
        made.scenario.write_text(json.dumps(source.as_dict()))
        made.write_json(
            "report.json", {"name": "ring", "baselines": {"popularity": {}}, "stages": {"pretrain": {}}}
        )
        return SimpleNamespace(state="finished", was_interrupted=False)

    def run(source, run_dir, command):
        began.append(f"run {run_dir.name}")
        return finish(run_dir, source)

    def resume(path, scenario_file):
        began.append(f"resume {path.name}")
        return finish(path, scenario_file)

    monkeypatch.setattr(api, "run", run)
    monkeypatch.setattr(api, "resume", resume)
    return began


def test_seeds_run_once_each_and_an_unfinished_one_goes_on(ring, started, typed, tmp_path):
    code, out, err = typed("run", ring.scenario, "--seeds", "1,30", "--run-dir", "many")
    assert (code, started) == (0, ["run seed-1", "run seed-30"]), err
    assert "2 seeds (1, 30)" in out
    assert f"report     {tmp_path / 'many' / 'report.html'}" in out
    unfinished = tmp_path / "many" / "seed-30"
    (unfinished / "report.json").unlink()
    (unfinished / "checkpoints" / "step-9").mkdir(parents=True)
    started.clear()
    pooled = json.loads(typed("run", ring.scenario, "--seeds", "1,30", "--run-dir", "many", "--json")[1])
    assert started == ["resume seed-30"]
    assert pooled == json.loads((tmp_path / "many" / "seeds.json").read_text())
    assert all(row["values"][1] == 0.0 for row in pooled["subjects"]["pretrain"].values())
    assert "Pretrain" in (tmp_path / "many" / "report.html").read_text()


def test_a_stopped_seed_ends_the_command_and_says_how_to_go_on(ring, typed, monkeypatch, tmp_path):
    monkeypatch.setattr(api, "run", lambda *_, **__: SimpleNamespace(state="stopped", was_interrupted=True))
    code, out, err = typed("run", ring.scenario, "--seeds", "1,2", "--run-dir", "many")
    assert (code, out) == (130, "")
    assert f"nonet resume {tmp_path / 'many'}" in err
    assert not (tmp_path / "many" / "seeds.json").exists()


def test_seeds_that_can_not_be_pooled_are_refused_before_anything_runs(ring, run, started, refused, typed):
    for seeds in ("7,eight", "7,,8", "", "-1"):
        assert "--seeds must be whole numbers such as 7,8,9" in refused(
            "run", ring.scenario, f"--seeds={seeds}"
        )
    assert "--seeds must be different numbers" in refused("run", ring.scenario, "--seeds", "7,7")
    assert "omit --resume" in refused("run", ring.scenario, "--seeds", "7", "--resume")
    assert "such as recall@10" in refused(
        "run", ring.scenario, "--seeds", "7,8", "--set", "evaluate.metrics=[coverage]"
    )
    assert "is a run; with --seeds" in refused("run", ring.scenario, "--seeds", "7,8", "--run-dir", run.path)
    assert not started
    typed("run", ring.scenario, "--seeds", "7", "--run-dir", "many")
    assert "is a run of another scenario" in refused(
        "run", ring.scenario, "--seeds", "7,8", "--run-dir", "many", "--set", "data.history=9"
    )
    assert started == ["run seed-7"]
