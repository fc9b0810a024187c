"""The cells of the matrix: what each verb must do with a finished run of the stranger's shop.

A check gets the verb's outcome and asserts its content, not only that nothing was raised.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient
from stranger import EVENT_MS, EVENTS, ITEMS, START_MS, USERS, Shop

from nonet.controller.record import Checkpoints, RunFolder
from nonet.controller.scenario import Scenario, load_scenario
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app

TOP = 5
Command = Callable[..., tuple[int, str, str]]


@dataclass
class Cell:
    """A finished run with the command line.

    Attributes:
        shop: The shop whose tables the run was made from.
        folder: The run's folder; `copy_run` gives one that may be changed.
        scenario_path: The scenario that the run was made from.
        command: Runs the command line in this process: (exit code, stdout, stderr).
        tmp_path: An empty folder.
    """

    shop: Shop
    folder: RunFolder
    scenario_path: Path
    command: Command
    tmp_path: Path

    @cached_property
    def scenario(self) -> Scenario:
        return load_scenario(self.folder.scenario)[0]

    @property
    def makes_lists(self) -> bool:
        return self.scenario.model.spec.makes_lists

    def ask(self, *words: object) -> Any:
        """Run a command that must succeed, and return its JSON."""
        code, out, err = self.command(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    def refuse(self, *words: object) -> str:
        """Run a command that must be refused in one line with exit code 2; return the line."""
        code, out, err = self.command(*words)
        assert (code, out) == (2, ""), f"exit code {code}: {out}{err}"
        assert err.startswith("nonet: ")
        assert err.count("\n") == 1, err
        return err

    def copy_run(self) -> RunFolder:
        """Return a copy of the run that a verb may change."""
        target = self.tmp_path / "run"
        if not target.exists():
            shutil.copytree(self.folder.path, target)
        return RunFolder(target)

    @contextlib.contextmanager
    def serve(self, run: RunFolder) -> Iterator[TestClient]:
        """Answer requests from a run."""
        app = build_single_process_app(str(run.path), ServeConfig(deadline_s=20.0), True)
        try:
            with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
                yield client
        finally:
            app.state.service.engines.close()


def post(client: TestClient, path: str, **body: object) -> Any:
    """Return the answer to a request that must succeed."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert not answer.json().get("fallback"), answer.text
    return answer.json()


def check_report(cell: Cell) -> None:
    report = cell.ask("report", cell.folder.path)
    assert set(report["stages"]) == set(cell.scenario.stages)
    for metrics in (report["stages"] | report["baselines"]).values():
        assert set(metrics) >= set(cell.scenario.evaluate.metrics)
        assert all(math.isfinite(value) for value in metrics.values())
    code, out, _ = cell.command("report", cell.folder.path)
    assert code == 0
    assert str(cell.folder.path / "report.html") in out


def check_comparison(cell: Cell) -> None:
    code, out, err = cell.command("report", cell.folder.path, "--compare", cell.copy_run().path, "--json")
    assert code == 0, err
    differences = [value["diff"] for value in json.loads(out)["metrics"].values()]
    assert differences
    assert not any(differences)


def check_evaluation(cell: Cell, *words: object) -> None:
    """The stages and baselines have the metrics of the report."""
    report = cell.folder.read_json("report.json") or {}
    subjects = cell.ask("evaluate", cell.folder.path, *words)["subjects"]
    for name, metrics in (report["stages"] | report["baselines"]).items():
        expected = {metric: metrics[metric] for metric in subjects[name]}
        assert subjects[name] == pytest.approx(expected, abs=1e-6)
        assert expected


def check_evaluation_of_a_table(cell: Cell) -> None:
    """The very table that the run was made from gives the metrics of the report."""
    check_evaluation(cell, "--data", cell.shop.folder / "log.parquet")


def check_recommendation(cell: Cell) -> None:
    """Every stage lists titles for a user of the data, and for somebody who likes a title."""
    title = next(filter(None, cell.shop.titles))
    for words in (("--user", cell.shop.user_ids[3]), ("--like", title)):
        answer = cell.ask("recommend", cell.folder.path, *words, "--top", TOP)
        assert answer["history"]
        for stage in cell.scenario.stages:
            assert len(answer["columns"][stage]) == TOP
    cell.refuse("recommend", cell.folder.path, "--user", "nobody")


def recommend_for_users(cell: Cell, run: RunFolder, column: str = "member") -> dict[Any, list[Any]]:
    """Return the items that `recommend --users` lists for every user of the shop."""
    users, out = cell.tmp_path / f"{column}.parquet", cell.tmp_path / "lists.parquet"
    pq.write_table(pa.table({column: cell.shop.user_ids}), users)
    words = ("--users", users, "--out", out, "--top", TOP, "--workers", 1)
    assert cell.ask("recommend", run.path, *words)["users"] == USERS
    table = pq.read_table(out)
    assert table.column_names == ["member", "sku", "score", "cold_start", "version"]
    return dict(zip(table["member"].to_pylist(), table["sku"].to_pylist(), strict=True))


def check_sids(cell: Cell) -> None:
    facts = cell.ask("sids", cell.folder.path, "--html", cell.tmp_path / "sids.html")
    assert facts["items"] == sum(group["items"] for group in facts["groups"]) or len(facts["groups"]) == 12
    assert all(0 <= level["random"] <= 1 and 0 <= level["neighbours"] <= 1 for level in facts["levels"])
    assert facts["levels"][-1]["neighbours"] == 0  # ids are distinct
    assert "<svg" in (cell.tmp_path / "sids.html").read_text()


def check_recommendation_of_all(cell: Cell) -> None:
    lists = recommend_for_users(cell, cell.copy_run())
    assert set(lists) == set(cell.shop.user_ids)
    for items in lists.values():
        assert len(items) == len(set(items)) == TOP
        assert set(items) <= set(cell.shop.item_ids)


def list_of_last_stage(cell: Cell, answer: Any) -> list[dict[str, Any]]:
    """Return the rows of the last stage, which is the one that is served, in an answer of `nonet recommend`."""
    return answer["items"][list(cell.scenario.stages)[-1]]


def check_serving(cell: Cell) -> None:
    """A server lists items, scores them as it lists them, and knows a posted event; another program gets the same list."""
    run, user = cell.copy_run(), cell.shop.user_ids[3]
    with cell.serve(run) as client:
        listed = post(client, "/recommend", user=user, k=TOP)
        assert not listed["cold_start"]
        items = [row["item"] for row in listed["items"]]
        assert len(items) == TOP
        assert set(items) <= set(cell.shop.item_ids)
        scored = post(client, "/score", user=user, items=items)
        for row, other in zip(scored["items"], listed["items"], strict=True):
            assert row["item"] == other["item"]
            assert row["score"] == pytest.approx(other["score"], abs=1e-3)
        stranger = {"user": "somebody new" if isinstance(user, str) else 77, "k": TOP}
        assert post(client, "/recommend", **stranger)["cold_start"]
        time = START_MS + EVENTS * EVENT_MS
        post(client, "/events", user=stranger["user"], events=[{"item": items[0], "time": time}])
        assert not post(client, "/recommend", **stranger)["cold_start"]
    answer = cell.ask("recommend", cell.folder.path, "--user", user, "--top", TOP)
    assert [row["item"] for row in list_of_last_stage(cell, answer)] == items
    assert recommend_for_users(cell, run, "user_id")[user] == items


def check_refused_path(cell: Cell, path: str) -> None:
    """A server that lacks a path refuses a request in one line that names another one."""
    with cell.serve(cell.copy_run()) as client:
        answer = client.post(path, json={"user": cell.shop.user_ids[3]})
        assert answer.status_code == 422, answer.text
        message = answer.json()["error"]["message"]
        assert "ask /" in message
        assert "\n" not in message


def check_scoring(cell: Cell) -> None:
    """A server scores items of the shop for a user."""
    with cell.serve(cell.copy_run()) as client:
        items = cell.shop.item_ids[:4]
        rows = post(client, "/score", user=cell.shop.user_ids[3], items=items)["items"]
        assert [row["item"] for row in rows] == items
        assert all(math.isfinite(row["score"]) for row in rows)
        tasks = cell.scenario.model.spec.list_tasks(cell.scenario)
        assert all(set(row.get("tasks") or ()) == set(tasks) for row in rows)
        assert all(0 < row["tasks"][task] < 1 for row in rows for task in tasks)


def check_scores_of_rows(cell: Cell) -> None:
    """Each row of a table like the log gets a score, in order; a row of an unknown item gets none."""
    data, out = cell.tmp_path / "rows.parquet", cell.tmp_path / "scores.parquet"
    rows = cell.shop.log.slice(0, 20)
    strange = pa.array(
        ["no such article" if isinstance(cell.shop.item_ids[0], str) else 987_654] + [None] * 19
    )
    place = rows.column_names.index("sku")
    pq.write_table(rows.set_column(place, "sku", pc.coalesce(strange, rows["sku"])), data)
    result = cell.ask("score", cell.copy_run().path, "--data", data, "--out", out)
    assert (result["rows"], result["unknown_items"]) == (20, 1)
    table = pq.read_table(out)
    assert table["member"].to_pylist() == rows["member"].to_pylist()
    tasks = cell.scenario.model.spec.list_tasks(cell.scenario)
    columns = ["score", *(f"score_{task}" for task in tasks)]
    assert table.column_names == ["member", "sku", "moment", *columns, "cold_start", "version"]
    for column in columns:
        scores = table[column].to_pylist()
        assert scores[0] is None
        assert all(math.isfinite(score) for score in scores[1:])


def check_publishing(cell: Cell) -> None:
    run = cell.copy_run()
    _, manifest = Checkpoints(run.checkpoints).find_newest() or (None, None)
    assert manifest is not None
    assert cell.ask("publish", run.path, "--step", manifest.step)["step"] == manifest.step
    assert cell.ask("promote", f"{run.path}@1")["default"] == 1
    assert [row["state"] for row in cell.ask("versions", run.path)] == ["served"]
    cell.refuse("rollback", run.path)


def check_export(cell: Cell) -> None:
    """The folder is opened by its example, which prints items of the shop."""
    target, out = cell.tmp_path / "export", io.StringIO()
    assert cell.ask("export", cell.copy_run().path, target)["bytes"] > 0
    history = [str(item) for item in cell.shop.item_ids[:3]]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", ["example.py", *history])
        runpy.run_path(str(target / "example.py"), run_name="__main__")
    lines = out.getvalue().splitlines()
    assert cell.shop.titles[0] in lines[0]
    known = {str(item) for item in cell.shop.item_ids}
    listed = [line.split()[1] for line in lines[1:] if line.split()[1] in known]
    assert len(listed) == 10
    if not cell.makes_lists:
        return
    liked = [word for item in history for word in ("--items", item)]
    if cell.makes_lists:
        answer = list_of_last_stage(cell, cell.ask("recommend", cell.folder.path, *liked))
        assert [str(row["item"]) for row in answer] == listed
        return
    with cell.serve(cell.copy_run()) as client:
        scored = post(client, "/score", history=cell.shop.item_ids[:3], items=cell.shop.item_ids)["items"]
    best = sorted(scored, key=lambda row: -row["score"])[:10]
    assert [str(row["item"]) for row in best] == listed


def check_new_items(cell: Cell) -> None:
    """New items of a table like the run's get ids, and are recommended to somebody who is asked about them."""
    run, table = cell.copy_run(), cell.tmp_path / "new.parquet"
    is_text = isinstance(cell.shop.item_ids[0], str)
    ids = ["SKU-9001", "SKU-9002"] if is_text else [9001, 9002]
    pq.write_table(cell.shop.make_articles([ITEMS, ITEMS + 1], ids), table)
    record = cell.ask("items", "add", run.path, table)
    assert (record["added"], record["items"]) == (2, ITEMS + 2)
    liked = cell.ask("recommend", run.path, "--like", f"article new{ITEMS}", "--top", TOP)
    assert liked["history"] == [f"article new{ITEMS}"]


def check_withdrawal(cell: Cell) -> None:
    run, user = cell.copy_run(), cell.shop.user_ids[3]
    best = recommend_for_users(cell, run, "user_id")[user][0]
    assert cell.ask("items", "add", run.path, "--withdraw", best)["withdrawn"] == 1
    assert best not in recommend_for_users(cell, run, "user_id")[user]


def check_appending(cell: Cell) -> None:
    """Events of a table like the run's are appended to its store; a run without one is told to name one."""
    run, table = cell.copy_run(), cell.tmp_path / "later.parquet"
    later = cell.shop.log.slice(0, 2)
    moments = pa.array([START_MS + (EVENTS + i) * EVENT_MS for i in range(2)])
    pq.write_table(later.set_column(2, "moment", moments), table)
    words = ()
    if cell.scenario.data.sequences is None:
        assert "--store" in cell.refuse("store", "append", run.path, table)
        words = ("--store", f"lmdb:{cell.tmp_path}/events.lmdb")
    assert cell.ask("store", "append", run.path, table, *words)["events"] == 2


def check_reward_trial(cell: Cell) -> None:
    reward = cell.shop.folder / "rewards" / "cheap.py"
    words = ("--scenario", cell.scenario_path, "--set", "limit=4.0", "--users", 4)
    if "rl" not in cell.scenario.stages:
        assert "set data.split.rl" in cell.refuse("reward", "test", reward, *words)
        return
    trial = cell.ask("reward", "test", reward, *words)
    scores = {score for row in trial["scores"] for score in row}
    assert trial["users"]
    assert scores <= {0.0, 1.0}


def check_explained_samples(cell: Cell) -> None:
    code, out, err = cell.command("samples", "explain", cell.scenario_path)
    assert code == 0, err
    assert all(stage in out for stage in cell.scenario.stages)


def check_listing(cell: Cell) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NONET_RUNS", str(cell.folder.path.parent))
        assert cell.folder.id in {row["run"] for row in cell.ask("runs")}


def check_change_of_a_finished_run(cell: Cell) -> None:
    """A run that has finished has no step between which something could be changed."""
    reward = cell.shop.folder / "rewards" / "cheap.py"
    for words in (
        ("attach", cell.folder.path, "--reward", reward, "--set", "limit=4.0"),
        ("detach", cell.folder.path, "cheap"),
        ("set", cell.folder.path, "stages.rl.rewards.cheap.weight=1"),
    ):
        assert "has finished" in cell.refuse(*words)


def check_stop_of_a_finished_run(cell: Cell) -> None:
    assert "has finished" in cell.refuse("stop", cell.folder.path)
    assert "has finished" in cell.refuse("scale", cell.folder.path, "trainer=2")


CHECKS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "report": (check_report, ("report", "RUN")),
    "report --compare": (check_comparison, ("report", "RUN", "--compare", "RUN")),
    "evaluate": (check_evaluation, ("evaluate", "RUN")),
    "evaluate --data": (check_evaluation_of_a_table, ("evaluate", "RUN", "--data", "FILE")),
    "recommend": (check_recommendation, ("recommend", "RUN", "--user", "USER")),
    "recommend --users": (
        check_recommendation_of_all,
        ("recommend", "RUN", "--users", "FILE", "--out", "OUT"),
    ),
    "sids": (check_sids, ("sids", "RUN")),
    "/recommend": (check_serving, ("serve", "RUN")),
    "/score": (check_scoring, ("serve", "RUN")),
    "score": (check_scores_of_rows, ("score", "RUN", "--data", "FILE", "--out", "OUT")),
    "publish": (check_publishing, ("publish", "RUN", "--step", "1")),
    "export": (check_export, ("export", "RUN", "OUT")),
    "items add": (check_new_items, ("items", "add", "RUN", "FILE")),
    "items add --withdraw": (check_withdrawal, ("items", "add", "RUN", "--withdraw", "ITEM")),
    "store append": (check_appending, ("store", "append", "RUN", "FILE")),
    "reward test": (check_reward_trial, ("reward", "test", "cheap", "--scenario", "SCENARIO")),
    "samples explain": (check_explained_samples, ()),
    "runs": (check_listing, ()),
    "attach": (check_change_of_a_finished_run, ("attach", "RUN", "--reward", "hit")),
    "stop": (check_stop_of_a_finished_run, ()),
}
"""For each verb that reads a finished run, its check, and the words with which it is refused where kinds lack it."""
