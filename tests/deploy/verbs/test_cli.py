"""Wrong input on the command line: exit code 2, one line that says what is wrong, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from nonet.deploy import cli

CLICKS = """
name: clicks
data: {interactions: interactions.parquet, items: items.parquet, split: {use: leave_last_out, test: 1}}
model: {use: deepfm}
sparse: {defaults: {dim: 9}, tables: {item: {}, rating: {}}}
stages: {train: {epochs: 1, batch: {tokens: 64}, target: rating >= 1}}
evaluate: {metrics: [auc]}
"""

COMMANDS = {
    "run": "--set --run-dir --resume --seeds --detach --continue --json",
    "resume": "--set --json",
    "board": "--data --protocol --seeds --budget --run-dir --json",
    "tune": "--space --trials --set --run-dir --parallel --json",
    "plan": "--set --cluster --address --search --origins --json",
    "submit": "--address --set --name --env --detach",
    "stop": "--address",
    "status": "--address --watch --json",
    "logs": "--follow --role --rank --address",
    "why": "--address --json",
    "job": "",
    "runs": "--address --json",
    "report": "--compare --stage --with --json",
    "evaluate": "--data --column --metrics --stage --json",
    "score": "--data --out --column --json",
    "sids": "--html --json",
    "recommend": "--like --items --user --top --users --column --out --workers --json",
    "serve": "--port --host --config --monitoring --manifest --image",
    "top": "--every --times",
    "versions": "--json",
    "publish": "--step --json",
    "promote": "--share --json",
    "rollback": "--to --json",
    "export": "--version --form --json",
    "tradeoff": "--least --run-dir --set --json",
    "attach": "--reward --name --weight --set --stage --wait --json",
    "detach": "--name --stage --wait --json",
    "set": "--wait --json",
    "scale": "--wait --json",
    "import": "--column --items --missing",
    "scenarios": "--json",
    "new": "--data --items --column --missing --target",
    "doctor": "--json",
    "schema": "",
    "manifest": "--form --image --queue --set",
    "parity": "--pools --precision --set --run --steps --limit --json",
    "chaos": "--kill --times --seed --set --run-dir --shared --nodes-return --json",
    "pack": "--key --time --column --set",
    "bench": "--json --seeds --device --set",
    "reward test": "--scenario --weight --set --users --json",
    "items add": "--withdraw --json --trust",
    "samples explain": "--set",
    "samples stats": "--format --where --json",
    "store put": "--key --time --column --set",
    "store append": "--store --json",
    "store get": "--as-of --column --set",
    "store stats": "--column --set",
    "cache list": "--folder --json",
    "cache prune": "--unused-for --folder --json",
}


def nonet(folder: Path, *args: str, monkeypatch, capsys) -> tuple[int, str, str]:
    """Run the command line in this process, as if typed in `folder`."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NONET_RUNS", str(folder / "runs"))
    monkeypatch.setattr(sys, "argv", ["nonet", *args])
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def refused(ring, monkeypatch, capsys):
    """Run and plan the ring scenario with changes; both must refuse it in the same line before anything is written."""

    def run(*changes: str, verbs: tuple[str, ...] = ("run", "plan")) -> str:
        options = [part for change in changes for part in ("--set", change)]
        said = {}
        for verb in verbs:
            code, _, said[verb] = nonet(
                ring, verb, "ring.yaml", *options, monkeypatch=monkeypatch, capsys=capsys
            )
            assert code == 2, said[verb]
            assert said[verb].count("\n") == 1
            assert "Traceback" not in said[verb]
            assert not (ring / "runs").exists()
        (line,) = set(said.values())
        return line

    return run


def rewrite(path: Path, **columns) -> None:
    table = pq.read_table(path)
    for name, values in columns.items():
        table = table.drop([name]) if name in table.column_names else table
        table = table if values is None else table.append_column(name, pa.array(values))
    pq.write_table(table, path)


def test_missing_and_non_parquet_files(refused, ring):
    assert "no such file" in refused("data.interactions=nowhere.parquet")
    (ring / "text.parquet").write_text("a,b\n1,2\n")
    assert "text.parquet" in refused("data.interactions=text.parquet")


def test_missing_column_is_named_with_what_there_is(refused, ring):
    rewrite(ring / "interactions.parquet", timestamp=None)
    message = refused()
    assert "timestamp" in message
    assert "user_id" in message


def test_wrongly_typed_column_is_named(refused, ring):
    rewrite(ring / "interactions.parquet", timestamp=["soon"] * 960)
    assert "timestamp" in refused()


def test_empty_table(refused, ring):
    path = ring / "interactions.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    assert "interactions" in refused()


def test_items_outside_the_catalogue_are_counted(refused, ring):
    path = ring / "items.parquet"
    pq.write_table(pq.read_table(path).slice(2), path)
    assert "1000, 1001" in refused()


def test_duplicate_items_are_named(refused, ring):
    path = ring / "items.parquet"
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table, table.slice(3, 1)]), path)
    assert "1003" in refused()


def test_users_with_too_few_events(refused):
    assert "needs users with at least 54 events; the longest of 60 users has 16" in refused(
        "data.split.test=50"
    )


def test_target_names_an_unknown_column(refused):
    message = refused('stages.finetune.target="ratting >= 4"')
    assert "ratting" in message
    assert "rating" in message


def test_item_vectors_that_are_nowhere(refused, ring):
    assert "vectors.npy does not exist. Paths are relative to the scenario" in refused(
        "tokenizer.vectors=[vectors.npy]"
    )
    assert "Did you mean 'cooccurrence'?" in refused("tokenizer.vectors=[coocurrence]")
    assert "tokenizer.vectors is empty" in refused("tokenizer.vectors=[]")


def test_semantic_ids_that_are_nowhere_or_lack_an_item(refused, ring):
    change = "tokenizer={use: file, path: sids.json}"
    assert "tokenizer.path: " in refused(change)
    (ring / "sids.json").write_text(json.dumps({"1000": [0, 1]}))
    assert "items have no semantic id, first 1001" in refused(change)


def test_tiers_that_hold_no_row(refused):
    for tier in ("device", "host"):
        assert f"sparse.tables.item.tiers: 1 bytes of {tier} hold no row: one takes" in refused(
            f"sparse.tables.item={{tiers: {{{tier}: 1}}}}"
        )
    assert "host_rows must be more than twice" in refused(
        "sparse.tables.item={tiers: {device_rows: 50, host_rows: 60}}"
    )


def test_a_target_that_holds_for_no_training_event_would_train_on_nothing(refused):
    message = refused("stages.finetune.target='rating >= 99'")
    assert "stages.finetune.target: 'rating >= 99' holds for none of the" in message


def test_a_stage_may_not_take_the_name_of_a_baseline_or_of_what_every_run_does(refused):
    assert "stages.popularity: tokenise, evaluate, popularity" in refused("stages.popularity={epochs: 1}")
    assert "choose another" in refused("stages.evaluate={epochs: 1}")


def test_unknown_metric_and_negative_size(refused):
    assert "recal@5" in refused("evaluate.metrics=[recal@5]")
    assert "data.history: input should be greater than 0, got -3" in refused("data.history=-3")


def test_reward_that_does_not_import_or_misses_an_option(refused, ring):
    assert "own" in refused("stages.rl.rewards.own={use: rewards/none.py}")
    (ring / "rewards" / "own.py").write_text("import nothing_like_that")
    assert "nothing_like_that" in refused()
    (ring / "rewards" / "own.py").write_text(
        "import nonet\n@nonet.reward\ndef own(item, *, ceiling): return item"
    )
    message = refused("stages.rl.rewards.own={use: rewards/own.py, cieling: 3}")
    assert "reward 'own' has no option 'cieling'; did you mean 'ceiling'?" in message


def test_a_reward_s_columns_are_looked_for_before_anything_starts(refused, ring):
    own = ring / "rewards" / "own.py"
    use = "stages.rl.rewards.own={use: rewards/own.py}"
    own.write_text("import nonet\n@nonet.reward\ndef own(titel): return titel")
    assert "reward 'own' asks for the column 'titel'; items have item, item_id, title" in refused(use)
    own.write_text(
        "import nonet\nclass Own(nonet.Reward):\n    columns = ['prise']\n    def score(self, r): return r['prise']"
    )
    assert "reward 'own' asks for the column 'prise'" in refused(use)


def test_a_job_is_checked_before_it_is_sent_and_what_is_elsewhere_is_listed(ring, monkeypatch, capsys):
    def submit(change: str) -> tuple[int, str]:
        options = ["--address", "http://127.0.0.1:1", "--set", change]
        code, _, err = nonet(ring, "submit", "ring.yaml", *options, monkeypatch=monkeypatch, capsys=capsys)
        return code, err

    code, err = submit("stages.rl.rewards.own.cieling=3")
    assert (code, err.count("\n")) == (2, 1)
    assert "no option 'cieling'" in err
    monkeypatch.setattr(
        "nonet.deploy.run.jobs.client.ClusterClient.__init__", lambda *_: pytest.fail("a cluster was asked")
    )
    code, err = submit("roles={evaluator: {engine: ddp}}")
    assert code == 2
    assert "a run has one engine" in err


def test_a_reward_is_tried_with_a_scenario_that_runs_only(ring, monkeypatch, capsys):
    text = (ring / "ring.yaml").read_text()
    (ring / "broken.yaml").write_text(text.replace("rating >= 4", "ratng >= 4"))
    options = ["own", "--scenario", "broken.yaml"]
    code, _, err = nonet(ring, "reward", "test", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "names column 'ratng'" in err


def test_plan_and_run_refuse_the_label_as_a_feature_in_the_same_line(ring, monkeypatch, capsys):
    (ring / "clicks.yaml").write_text(CLICKS)
    said = set()
    for verb in ("plan", "run"):
        code, _, err = nonet(ring, verb, "clicks.yaml", monkeypatch=monkeypatch, capsys=capsys)
        assert code == 2
        said.add(err)
    (line,) = said
    assert "sparse.tables.rating: the feature 'rating' is the label (stages.train.target names it)" in line


def test_resume_with_nothing_to_resume(ring, monkeypatch, capsys):
    code, _, err = nonet(
        ring, "run", "ring.yaml", "--resume", "--run-dir", "none", monkeypatch=monkeypatch, capsys=capsys
    )
    assert (code, "has no run to resume" in err) == (2, True)
    code, _, err = nonet(ring, "resume", "none", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "there is no run 'none'" in err) == (2, True)


def test_plan_as_json_and_for_another_cluster(ring, monkeypatch, capsys):
    code, out, _ = nonet(ring, "plan", "ring.yaml", "--json", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert [stage["name"] for stage in json.loads(out)["stages"]] == [
        "tokenise",
        "pretrain",
        "finetune",
        "rl",
        "evaluate",
    ]
    (ring / "view.yaml").write_text("nodes: [{id: n, resources: {CPU: 0.1}}]")
    code, _, err = nonet(
        ring, "plan", "ring.yaml", "--cluster", "view.yaml", monkeypatch=monkeypatch, capsys=capsys
    )
    assert (code, "needs 0.25 CPU" in err) == (1, True)


def test_new_copies_a_scenario_with_its_rewards_and_never_overwrites(ring, monkeypatch, capsys):
    code, _, _ = nonet(ring, "new", "quickstart", "mine/feed.yaml", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, (ring / "mine" / "rewards" / "novelty.py").is_file()) == (0, True)
    code, _, err = nonet(ring, "new", "quickstart", "mine/feed.yaml", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "already exists" in err) == (2, True)


def test_import_writes_two_tables(ring, monkeypatch, capsys):
    (ring / "log.csv").write_text("uid,sku,ts\n1,a,10\n1,b,20\n2,a,30\n")
    code, _, err = nonet(
        ring,
        "import",
        "csv",
        "log.csv",
        "out",
        "--column",
        "user=uid",
        "--column",
        "item=sku",
        "--column",
        "time=ts",
        monkeypatch=monkeypatch,
        capsys=capsys,
    )
    assert code == 0, err
    assert pq.read_table(ring / "out" / "interactions.parquet").num_rows == 3
    code, _, err = nonet(ring, "import", "cvs", "log.csv", "out2", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, (ring / "out2").exists()) == (2, False)


def test_a_path_that_cannot_be_written_is_one_line(ring, monkeypatch, capsys):
    (ring / "log.csv").write_text("user,item,ts\n1,a,10\n")
    for args in (("import", "csv", "log.csv", "log.csv"), ("new", "quickstart", "log.csv/mine.yaml")):
        code, _, err = nonet(ring, *args, monkeypatch=monkeypatch, capsys=capsys)
        assert (code, err.count("\n")) == (2, 1), err
        assert "log.csv" in err


def test_a_run_dir_that_holds_other_files_is_left_alone(ring, monkeypatch, capsys):
    for folder, said in ((".", "is not empty and holds no run"), ("ring.yaml", "is a file")):
        code, _, err = nonet(
            ring, "run", "ring.yaml", "--run-dir", folder, monkeypatch=monkeypatch, capsys=capsys
        )
        assert (code, err.count("\n"), said in err) == (2, 1, True), err
    assert (ring / "interactions.parquet").is_file()


def test_seeds_of_a_bench_are_numbers(ring, monkeypatch, capsys):
    code, _, err = nonet(ring, "bench", "quickstart", "--seeds", "a", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "--seeds must be whole numbers such as 7,8,9, got 'a'" in err) == (2, True)


def test_a_misspelt_role_or_key_of_every_reward_is_told_what_there_is(refused):
    assert (
        "roles.trainr (a role of your own must name its kind, use: file.py:SPEC. Did you mean 'trainer'?)"
        in refused("roles={trainr: {workers: 1}}", verbs=("run",))
    )
    assert "Every reward has weight, at_least, timeout_s, pool, workers." in refused(
        "stages.rl.rewards.hit={wieght: 2}"
    )


def test_ctrl_c_before_a_run_is_under_way_is_no_success(ring, monkeypatch, capsys):
    from nonet.deploy.run import api

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "scenario", interrupted)
    code, _, err = nonet(ring, "plan", "ring.yaml", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, err.splitlines()[-1]) == (130, "nonet: interrupted")


def test_unknown_verb_is_one_line(ring, monkeypatch, capsys):
    code, _, err = nonet(ring, "rum", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['nonet', '--help']\nfrom nonet.deploy.cli import main\n"
        "try: main()\nfinally: assert not {'torch', 'ray', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=os.environ)


def test_commands_and_options_keep_their_names_whatever_functions_are_called():
    def list_options(group, prefix=""):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from list_options(command, f"{prefix}{name} ")
            else:
                options = (parameter.opts[0] for parameter in command.params)
                yield prefix + name, " ".join(option for option in options if option.startswith("-"))

    assert dict(list_options(typer.main.get_command(cli.app))) == COMMANDS


def test_messages_of_ray_about_lost_workers_are_on_stderr(capsys):
    output = cli.OwnOutput(sys.stdout)
    thread = threading.Thread(
        name="ray_listen_error_messages", target=lambda: print("A worker died", file=output)
    )
    thread.start()
    thread.join()
    print("{}", file=output)
    assert capsys.readouterr() == ("{}\n", "A worker died\n")
