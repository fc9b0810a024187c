"""A value of env.vars reaches the run, and no page, file or message."""

from __future__ import annotations

import json

import pytest

from nonet import yaml
from nonet.controller.cluster.view import read_local_view
from nonet.controller.plan.planner import plan
from nonet.controller.record.run_folder import RunFolder
from nonet.controller.scenario.document.hidden import HIDDEN, hide_in_command, restore_values
from nonet.controller.scenario.document.library import LIBRARY
from nonet.controller.scenario.scenario import Scenario, load_scenario, to_document
from nonet.controller.session.session import Session
from nonet.controller.setup.run_files import write_run
from nonet.deploy.run import api
from nonet.errors import ConfigError
from nonet.trust import approve_code
from nonet.workers.devices.environment import PoolEnvironment

SECRET = "hunter2"


def with_secret(value: str = SECRET, *more: str) -> Scenario:
    changes = [f"pools={{spare: {{env: {{vars: {{TOKEN: {value}, HOME: '${{HOME}}'}}}}}}}}"]
    return load_scenario("quickstart", [*changes, "roles={rollout: {pool: spare, workers: 1}}", *more])[0]


def values(scenario: Scenario) -> dict[str, str]:
    env = scenario.pools["spare"].env
    assert env is not None
    return dict(env.vars)


def test_no_value_is_in_the_plan_and_every_name_is():
    made = plan(with_secret(), read_local_view())
    assert "vars TOKEN, HOME" in made.pools["spare"]
    for shown in (made.format_text(), json.dumps(made.as_dict())):
        assert SECRET not in shown
        assert "TOKEN" in shown


def test_a_run_s_folder_holds_no_value(tmp_path):
    run = RunFolder(tmp_path / "run")
    write_run(with_secret(), LIBRARY, run)
    assert not [path for path in run.path.rglob("*") if path.is_file() and SECRET in path.read_text()]
    kept = yaml.read(run.scenario)["pools"]["spare"]["env"]["vars"]
    assert kept == {"TOKEN": HIDDEN, "HOME": "${HOME}"}, "a reference is a name"
    assert SECRET not in json.dumps(api.ScenarioFile(with_secret(), tmp_path).as_dict())


def test_the_workers_still_get_them():
    envs = {name: pool.env.model_dump() for name, pool in with_secret().pools.items() if pool.env}
    from nonet.workers.devices.vendors import get_device

    told = PoolEnvironment.from_options(envs["spare"]).to_runtime_env(get_device("cpu"))
    assert told["env_vars"]["TOKEN"] == SECRET


def test_another_value_is_the_same_scenario_with_the_same_hash(tmp_path):
    run = RunFolder(tmp_path / "run")
    first = write_run(with_secret(), LIBRARY, run)
    assert write_run(with_secret("changed"), LIBRARY, run) == first
    with pytest.raises(ConfigError, match="is a run of another scenario"):
        write_run(with_secret(SECRET, "seed=8"), LIBRARY, run)


def test_a_run_that_stored_its_values_is_still_the_run_of_its_scenario(tmp_path):
    import hashlib

    run = RunFolder(tmp_path / "run")
    write_run(with_secret(), LIBRARY, run)
    text = run.scenario.read_text().replace(HIDDEN, SECRET)
    run.scenario.write_text(text)
    approve_code(run.path)  # the approval covers the environments of pools, whose text is another one
    assert write_run(with_secret(), LIBRARY, run) == hashlib.sha256(text.encode()).hexdigest()


def stored(tmp_path) -> Scenario:
    run = RunFolder(tmp_path / "run")
    write_run(with_secret(), LIBRARY, run)
    return load_scenario(run.scenario)[0]


def test_who_resumes_takes_values_from_the_scenario_at_hand_or_from_the_environment(tmp_path):
    found, taken = restore_values(stored(tmp_path), with_secret("given"), {"TOKEN": "environment"})
    assert (values(found)["TOKEN"], taken) == ("given", [])
    found, taken = restore_values(stored(tmp_path), None, {"TOKEN": "environment"})
    assert (values(found)["TOKEN"], taken) == ("environment", ["TOKEN"])
    assert to_document(found) == to_document(stored(tmp_path))
    assert values(found)["HOME"] == "${HOME}"


def test_a_value_that_nobody_has_is_asked_for_by_name(tmp_path, monkeypatch):
    said = r"pools\.spare\.env\.vars\.TOKEN: .* \(export TOKEN=\.\.\.\) or give --set pools\.spare\.env\.vars\.TOKEN="
    with pytest.raises(ConfigError, match=said):
        restore_values(stored(tmp_path), None, {})
    monkeypatch.delenv("TOKEN", raising=False)
    with pytest.raises(ConfigError, match=said):
        Session(stored(tmp_path))
    with pytest.raises(ConfigError, match=said):
        api.resume(tmp_path / "run")


def test_resume_takes_a_value_by_set_and_nothing_else(tmp_path, monkeypatch):
    stored(tmp_path)
    monkeypatch.delenv("TOKEN", raising=False)
    began = []
    monkeypatch.setattr(api, "_start", lambda scenario, *_, **__: began.append(scenario) or _Started())
    api.resume(tmp_path / "run", changes=["pools.spare.env.vars.TOKEN=set"])
    assert values(began[0])["TOKEN"] == "set"
    with pytest.raises(ConfigError, match="is a run of another scenario"):
        api.resume(tmp_path / "run", changes=["seed=8"])


class _Started:
    def wait(self, panel):
        return self


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        (["--set", f"pools.spare.env.vars.TOKEN={SECRET}"], f"pools.spare.env.vars.TOKEN={HIDDEN}"),
        (
            [f"--set=pools.spare.env.vars={{TOKEN: {SECRET}}}"],
            '--set=pools.spare.env.vars={"TOKEN": "' + HIDDEN,
        ),
        (["--set", f"pools={{spare: {{env: {{vars: {{TOKEN: {SECRET}}}}}}}}}"], '{"TOKEN": "' + HIDDEN),
        (["--set", f"pools.spare.env={{pip: [a], vars: {{TOKEN: {SECRET}"], f"pools.spare.env={HIDDEN}"),
    ],
)
def test_the_command_of_the_report_has_no_value(typed, kept):
    shown = hide_in_command(["run", "quickstart", *typed, "--set", "seed=7"])
    assert SECRET not in " ".join(shown)
    assert any(kept in word for word in shown)
    assert shown[:2] + shown[-2:] == ["run", "quickstart", "--set", "seed=7"]


@pytest.mark.parametrize(
    "change", ["pools={spare: {labels: {a: b}}}", "seed=7", "name", "pools.spare.device=cpu"]
)
def test_what_holds_no_value_is_kept_as_typed(change):
    assert hide_in_command(["--set", change]) == ["--set", change]


@pytest.mark.parametrize(
    "change",
    [
        "pools.spare.env.vars.TOKEN=424242",
        "pools.spare.env.vars=424242",
        "pools.spare.env={vars: {TOKEN: [424242]}}",
        "pools={spare: {env: {vars: {TOKEN: 424242}}}}",
    ],
)
def test_an_error_about_a_value_does_not_tell_it(change):
    with pytest.raises(ConfigError, match=r"pools\.spare\.env\.vars") as error:
        load_scenario("quickstart", [change])
    assert "424242" not in str(error.value)
    assert "not shown" in str(error.value)


def test_a_key_below_a_value_is_refused_without_telling_it():
    changes = [f"pools.spare.env.vars.TOKEN={SECRET}", "pools.spare.env.vars.TOKEN.more=1"]
    with pytest.raises(ConfigError, match="TOKEN holds a value, which has no keys"):
        load_scenario("quickstart", changes)
