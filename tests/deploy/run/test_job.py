"""Where a run of a Ray job is written: never into the job's package, which Ray deletes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nonet.controller.record.run_folder import create_run, find_runs_root
from nonet.deploy.run import api, submit
from nonet.deploy.run.panel import Panel
from nonet.deploy.verbs import running
from nonet.errors import ConfigError

PACKAGE = "ray/session_x/runtime_resources/working_dir_files/_ray_pkg_12ab"


@pytest.fixture(params=["the variable", "the folder", "both"])
def job(request, tmp_path, monkeypatch):
    """Imitate a process that Ray starts as a job's driver; return the home directory of its node."""
    (tmp_path / "home").mkdir()
    (tmp_path / PACKAGE).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NONET_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    if request.param != "the variable":
        monkeypatch.chdir(tmp_path / PACKAGE)
    if request.param != "the folder":
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    return tmp_path / "home"


def test_runs_of_a_job_go_to_the_home_directory_of_its_node(job):
    assert find_runs_root() == job / "nonet-runs"
    assert create_run("quickstart").path.parent == job / "nonet-runs"


def test_a_job_follows_the_variable_for_runs_and_never_into_its_package(job, tmp_path, monkeypatch):
    monkeypatch.setenv("NONET_RUNS", str(tmp_path / "shared"))
    assert find_runs_root() == tmp_path / "shared"
    monkeypatch.setenv("NONET_RUNS", "mine")
    assert find_runs_root() == job / "mine"


def test_elsewhere_runs_are_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("NONET_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert find_runs_root() == tmp_path / "runs"


@pytest.mark.parametrize("job", ["the folder", "both"], indirect=True)
def test_a_run_dir_inside_the_package_is_refused(job, tmp_path):
    with pytest.raises(ConfigError, match="in the job's package, which Ray deletes"):
        create_run("x", "out")
    assert create_run("x", tmp_path / "out").path == tmp_path / "out"


def test_a_job_says_at_its_start_and_its_end_where_its_run_is(job, monkeypatch, capsys):
    class Started:
        folder, state, report, warnings = create_run("quickstart"), "done", {}, ()

        def wait(self, panel):
            return self

    monkeypatch.setattr(api, "_start", lambda *_, **__: Started())
    shown = io.StringIO()
    api.run("quickstart", panel=Panel(shown, live=False))
    assert f"this run's folder: {Started.folder.path} on " in shown.getvalue()
    running._print_result(Started(), as_json=True)
    assert f"this run's folder: {Started.folder.path} on " in capsys.readouterr().err


JOB = """
import socket, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster
from nonet.deploy.run import submit_job
from nonet.errors import NonetError
ring = Path(sys.argv[1])

def free_port():
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]

# The agent that starts jobs listens on one port of the host by default: another Ray may have it.
cluster = Cluster(initialize_head=True, head_node_args={
    "num_cpus": 4, "object_store_memory": 200_000_000, "include_dashboard": True, "dashboard_port": free_port(),
    "dashboard_agent_listen_port": free_port()})
code = 1
for _ in range(60):
    try:
        code = submit_job(str(ring / "ring.yaml"), f"http://{cluster.head_node.webui_url}", [], True)
        break
    except NonetError as error:  # the head's agent starts after the head
        print(error, file=sys.stderr)
        time.sleep(2)
cluster.shutdown()
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_submitted_run_is_there_when_its_job_is_over(tmp_path):
    from tests_ring import make_ring

    (tmp_path / "ring").mkdir()
    (tmp_path / "home").mkdir()
    ring = make_ring(tmp_path / "ring")
    (ring / ".gitignore").write_text("*.parquet\nrewards/\n")
    binaries = Path(sys.executable).parent
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "NONET_RUNS")}
    environment |= {"HOME": str(tmp_path / "home"), "PATH": f"{binaries}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(ring)], capture_output=True, text=True, timeout=800, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (run,) = (tmp_path / "home" / "nonet-runs").iterdir()
    assert json.loads((run / "report.json").read_text())["run"] == run.name
    assert done.stdout.count(f"this run's folder: {run} on ") == 2


def staged(folder, named=()):
    """Names of what travels with a job of a scenario in this folder."""
    place = folder.parent / "staged"
    place.mkdir()
    files = submit._find_named_files({"a": list(named)}, folder)
    submit.stage_files(folder, folder / "s.yaml", sorted(files), place)
    return place, sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "my jobs é"
    for name in ("s.yaml", "data/1.parquet", "data/2.parquet", "other/big.bin", "notes.txt", ".git/config"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text("data/\nother/\n")
    return folder


@pytest.mark.parametrize("named", ["data", "data/*.parquet", "./data"])
def test_what_a_scenario_names_travels_whatever_gitignore_says_and_the_rest_as_ray_takes_it(work, named):
    _, names = staged(work, [named])
    assert names == ["data/1.parquet", "data/2.parquet", "notes.txt", "s.yaml", "submitted-files.json"]


def test_what_did_not_arrive_whole_is_named_before_the_run_starts(work):
    place, _ = staged(work, ["data"])
    submit.check_arrived(place)
    (place / "data" / "2.parquet").unlink()
    (place / "data" / "2.parquet").write_text("half")
    with pytest.raises(ConfigError, match=r"1 of 3 files .* the first is data/2.parquet; submit again"):
        submit.check_arrived(place)
    assert (work / "data" / "2.parquet").read_text() == "data/2.parquet"


def test_a_relative_path_that_leaves_the_folder_is_refused_and_an_absolute_one_is_elsewhere(work, tmp_path):
    (tmp_path / "shared.py").write_text("")
    with pytest.raises(
        ConfigError, match=r"\.\./shared.py is outside of .*move it there, or give an absolute"
    ):
        submit._find_named_files({"use": "../shared.py"}, work)
    assert not submit._find_named_files({"path": str(tmp_path / "shared.py"), "far": "s3://bucket/x"}, work)
