"""A job on the cluster: where its run is written, what it checks first, and when it continues a run."""

from __future__ import annotations

import io
import zipfile

import pytest

import nonet
from nonet import trust
from nonet.controller.record.run_folder import RunFolder, create_run, describe_place, find_runs_root
from nonet.controller.scenario import load_scenario
from nonet.controller.setup.run_files import write_run
from nonet.deploy.run import api
from nonet.deploy.run.jobs.job import run_submitted
from nonet.deploy.run.jobs.package import write_package
from nonet.deploy.run.panel import Panel
from nonet.deploy.verbs import running
from nonet.errors import ConfigError
from nonet.storage import change_run, read_address
from tests.s3 import BUCKET, serve_s3

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
    running.print_result(Started(), as_json=True)
    assert f"this run's folder: {Started.folder.path} on " in capsys.readouterr().err


@pytest.fixture
def unpacked(ring, tmp_path, monkeypatch):
    """Unpack the package of the ring scenario, and record how runs are started or resumed instead of doing so."""
    monkeypatch.setenv("NONET_RUNS", str(tmp_path / "all"))
    started = []
    monkeypatch.setattr(api, "run", lambda scenario, **options: started.append(("run", scenario, options)))
    monkeypatch.setattr(api, "resume", lambda run, **options: started.append(("resume", run, options)))

    def unpack(version: str = nonet.__version__, **options):
        scenario, _ = load_scenario(ring / "ring.yaml")
        given = {
            "changes": ["stages.pretrain.epochs=7", "pools.cpu.env.vars.KEY=secret"],
            "env": [],
        } | options
        write_package(tmp_path / "p.zip", scenario, ring / "ring.yaml", version=version, **given)
        with zipfile.ZipFile(tmp_path / "p.zip") as archive:
            archive.extractall(tmp_path / "job")
        return tmp_path / "job", started

    return unpack


def test_a_job_runs_the_scenario_with_its_changes_under_the_given_name_and_the_report_hides_values(
    unpacked, tmp_path
):
    folder, started = unpacked()
    run_submitted("mine", folder)
    ((verb, source, options),) = started
    assert verb == "run"
    assert source.scenario.stages["pretrain"].epochs == 7
    assert source.folder == folder
    assert options["run_dir"].path == tmp_path / "all" / "mine"
    assert options["command"].startswith("nonet submit ring.yaml --set stages.pretrain.epochs=7")
    assert "secret" not in options["command"]


def test_a_job_continues_a_run_that_has_a_checkpoint_and_refuses_one_that_has_finished(unpacked, tmp_path):
    folder, started = unpacked(changes=[])
    run = tmp_path / "all" / "mine"
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    (run / "scenario.yaml").write_text((folder / "ring.yaml").read_text())
    run_submitted("mine", folder)
    assert [(verb, path) for verb, path, _ in started] == [("resume", run)]
    (run / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run mine has finished: see .*mine on .*; .* another --name"):
        run_submitted("mine", folder)


def test_a_job_keeps_its_run_in_the_storage_of_its_scenario_and_continues_the_one_that_is_there(
    unpacked, tmp_path, monkeypatch
):
    monkeypatch.setenv("NONET_CACHE", str(tmp_path / "cache"))
    with serve_s3():
        folder, started = unpacked(changes=[f"storage={BUCKET}/jobs"])
        run_submitted("mine", folder)
        ((verb, _, options),) = started
        run = options["run_dir"]
        assert (verb, run.id, describe_place(run)) == ("run", "mine", f"{BUCKET}/jobs/mine")
        with change_run(run.path):
            run.scenario.write_text((folder / "ring.yaml").read_text())
            (run.checkpoints / "step-000003").mkdir(parents=True)
            (run.checkpoints / "step-000003" / "manifest.json").write_text("{}")
        monkeypatch.setenv("NONET_CACHE", str(tmp_path / "another"))
        run_submitted("mine", folder)
        verb, path, _ = started[-1]
        assert (verb, read_address(path)) == ("resume", f"{BUCKET}/jobs/mine")
        with change_run(path):
            (path / "report.json").write_text("{}")
        with pytest.raises(ConfigError, match=f"run mine has finished: see {BUCKET}/jobs/mine; "):
            run_submitted("mine", folder)


def test_variables_that_the_cluster_lacks_are_all_named_before_anything_starts(unpacked, monkeypatch):
    folder, started = unpacked(env=["HERE", "MISSING_1", "MISSING_2"])
    monkeypatch.setenv("HERE", "x")
    with pytest.raises(ConfigError, match="environment lacks MISSING_1, MISSING_2"):
        run_submitted("mine", folder)
    assert not started
    monkeypatch.setenv("MISSING_1", "x")
    monkeypatch.setenv("MISSING_2", "")
    run_submitted("mine", folder)
    assert len(started) == 1


def test_a_job_of_another_version_of_nonet_is_refused(unpacked):
    folder, started = unpacked("0.0.9")
    with pytest.raises(
        ConfigError, match=rf"has nonet {nonet.__version__}, and the job was submitted by nonet 0.0.9"
    ):
        run_submitted("mine", folder)
    assert not started


def test_a_folder_that_is_no_package_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not the folder of a submitted job"):
        run_submitted("mine", tmp_path)


def test_a_job_of_the_stored_scenario_of_a_run_approves_the_code_that_was_submitted(
    unpacked, ring, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_approved", set())
    monkeypatch.setattr(trust, "_guarded", {})
    _, started = unpacked()
    run = RunFolder(tmp_path / "old")
    write_run(load_scenario(ring / "ring.yaml")[0], ring, run)
    scenario, _ = load_scenario(run.scenario)
    write_package(tmp_path / "q.zip", scenario, run.scenario, changes=[], env=[], version=nonet.__version__)
    with zipfile.ZipFile(tmp_path / "q.zip") as archive:
        archive.extractall(tmp_path / "again")
    (tmp_path / "config/nonet/trusted").unlink()  # a pod remembers nothing
    trust._approved.clear()
    run_submitted("mine", tmp_path / "again")
    assert [verb for verb, *_ in started] == ["run"]
    assert trust.is_guarded(tmp_path / "again")
    (own,) = (tmp_path / "again").rglob("own.py")
    trust.read_code(own, "use")


@pytest.mark.parametrize("change", ["nothing", "a file more", "a compiled file", "a name", "other code"])
def test_a_job_approves_the_code_of_its_package_and_nothing_else_that_its_run_has(
    unpacked, ring, tmp_path, monkeypatch, change
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_approved", set())
    folder, _ = unpacked(changes=[])
    run = RunFolder(tmp_path / "all" / "mine")
    write_run(load_scenario(folder / "ring.yaml")[0], folder, run)
    (run.checkpoints / "step-000003").mkdir(parents=True)
    (tmp_path / "config/nonet/trusted").unlink()  # a new pod remembers nothing
    trust._approved.clear()
    if change == "a file more":  # its content is that of a file of the package
        (run.sources / "helper.py").write_bytes(next(run.sources.rglob("*.py")).read_bytes())
    elif change == "a compiled file":
        (run.sources / "helper.pyc").write_bytes(b"")
    elif change == "a name":
        text = run.scenario.read_text()
        run.scenario.write_text(text.replace("own.py", "own.py:other"))
    elif change == "other code":
        next(run.sources.rglob("*.py")).write_text("")
    run_submitted("mine", folder)
    assert trust.is_approved(run.path) == (change == "nothing")
