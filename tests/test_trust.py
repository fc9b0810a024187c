"""Code of runs and exports is run only if this user has started or approved it."""

from __future__ import annotations

import json
import os
import py_compile
import re
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from nonet import trust
from nonet.controller.scenario import load_scenario
from nonet.errors import ConfigError
from nonet.plugins import PluginFiles, import_file, load_reference
from nonet.rl.rewards import find_reward
from nonet.rl.rewards.ctr import PredictedClick
from nonet.run_code import (
    CodePart,
    list_references,
    read_code_parts,
    read_copy_records,
    read_registry_address,
)
from nonet.trust import (
    add_references,
    add_stored_references,
    approve_code,
    approve_parts,
    approve_registry,
    check_attached,
    check_folder,
    check_reference,
    check_registry,
    compute_code_hash,
    guard_folder,
    guard_work_folder,
    import_no_code,
    is_approved,
    list_trust,
    read_code,
)


@pytest.fixture(autouse=True)
def forget(tmp_path, monkeypatch):
    """Guard no folder before and after a test, approve nothing, and import modules beside files again."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_guarded", {})
    monkeypatch.setattr(trust, "_views", set())
    monkeypatch.setattr(trust, "_approved", set())
    monkeypatch.setattr(trust, "_settings", {"approves": False, "imports": True})
    yield
    sys.path[:] = [place for place in sys.path if not place.startswith(str(tmp_path))]
    for name in [name for name in sys.modules if name.startswith(("helper", "nonet_own_"))]:
        del sys.modules[name]
    sys.path_importer_cache.clear()


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of somebody else whose code leaves a mark."""
    folder = tmp_path / "run-1"
    (folder / "sources").mkdir(parents=True)
    mark = tmp_path / "mark"
    (folder / "sources/evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nSPEC = None\n")
    (folder / "scenario.yaml").write_text("name: x")
    return folder


def test_code_of_a_guarded_folder_is_not_run_before_it_is_approved(run, tmp_path):
    guard_folder(run)
    with pytest.raises(ConfigError, match=rf"evil\.py.*--trust, or set NONET_TRUST={compute_code_hash(run)}"):
        import_file(run / "sources/evil.py", "tokenizer.use")
    assert not (tmp_path / "mark").exists()
    approve_code(run)
    import_file(run / "sources/evil.py", "tokenizer.use")
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("change", ["sources/evil.py", "sources/table.csv", "artifacts/other.py"])
def test_changed_code_is_not_approved_any_more(run, change):
    guard_folder(run)
    approve_code(run)
    assert is_approved(run)
    (run / change).parent.mkdir(exist_ok=True)
    (run / change).write_text("another")
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        read_code(run / "sources/evil.py", "tokenizer.use")


def test_results_of_a_run_are_no_code(run):
    approve_code(run)
    (run / "report.json").write_text("{}")
    (run / "sources/__pycache__").mkdir()
    (run / "sources/__pycache__/evil.pyc").write_text("")
    assert is_approved(run)


def test_code_in_a_run_but_outside_its_sources_and_behind_links_is_guarded_too(run, tmp_path):
    guard_folder(run)
    (run / "artifacts").mkdir()
    (run / "artifacts/evil.py").write_text("")
    (tmp_path / "link.py").symlink_to(run / "artifacts/evil.py")
    (run / "out.py").symlink_to(tmp_path / "elsewhere.py")
    for file in (
        run / "artifacts/evil.py",
        run / "sources/../artifacts/evil.py",
        tmp_path / "link.py",
        run / "out.py",
    ):
        with pytest.raises(ConfigError, match="NONET_TRUST"):
            read_code(file, "use")


def test_a_machine_that_remembers_nothing_takes_hashes_from_the_environment(run, monkeypatch):
    guard_folder(run)
    monkeypatch.setenv("NONET_TRUST", f"0123,{compute_code_hash(run)}")
    read_code(run / "sources/evil.py", "use")


def test_the_option_approves_what_the_command_opens_and_is_remembered(run, monkeypatch):
    trust.approve_opened_folders()
    guard_folder(run)
    read_code(run / "sources/evil.py", "use")
    monkeypatch.setattr(trust, "_settings", {"approves": False, "imports": True})
    read_code(run / "sources/evil.py", "use")


def test_an_approval_behind_a_torn_line_is_remembered(run, monkeypatch):
    approvals = trust._find_approvals()
    approvals.parent.mkdir(parents=True)
    approvals.write_text("0123")
    trust.approve_code(run)
    monkeypatch.setattr(trust, "_approved", set())
    assert trust.is_approved(run)


def test_a_command_that_only_reads_imports_no_code_not_even_approved_code(run):
    guard_folder(run)
    approve_code(run)
    with import_no_code(), pytest.raises(ConfigError, match="which this command does not run"):
        read_code(run / "sources/evil.py", "use")
    read_code(run / "sources/evil.py", "use")


def test_a_verb_that_reads_imports_no_file_wherever_it_is(tmp_path):
    (tmp_path / "mine.py").write_text("SPEC = 1\n")
    use = f"{tmp_path / 'mine.py'}:SPEC"
    with (
        import_no_code(),
        pytest.raises(ConfigError, match=r"mine\.py:SPEC is code, which this command does not run"),
    ):
        load_reference(use, PluginFiles(), "metric")
    assert load_reference(use, PluginFiles(), "metric") == 1


def test_files_of_the_user_need_no_approval(run, tmp_path):
    guard_folder(run)
    (tmp_path / "own.py").write_text("")
    import_file(tmp_path / "own.py", "use")


def leave_mark(mark: Path) -> str:
    """Return code that writes a file."""
    return f"open({str(mark)!r}, 'w').close()\n"


@pytest.fixture
def helped(run) -> Path:
    """An approved run whose code imports a module beside it."""
    (run / "sources/evil.py").unlink()
    (run / "sources/own.py").write_text("import helper\nVALUE = helper.VALUE\n")
    (run / "sources/helper.py").write_text("VALUE = 1\n")
    approve_code(run)
    guard_folder(run)
    return run


@pytest.mark.parametrize(
    "mode", [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.UNCHECKED_HASH]
)
@pytest.mark.parametrize("name", ["helper", "own"])
def test_a_compiled_file_beside_approved_code_is_not_run(helped, tmp_path, name, mode):
    source = helped / f"sources/{name}.py"
    good, times = source.read_bytes(), (source.stat().st_atime_ns, source.stat().st_mtime_ns)
    code = leave_mark(tmp_path / "mark") + "VALUE = 2\n"
    source.write_text(code.ljust(len(good)) if len(code) < len(good) else code)
    os.utime(source, ns=times)
    py_compile.compile(str(source), invalidation_mode=mode)
    source.write_bytes(good)
    os.utime(source, ns=times)
    if mode is py_compile.PycInvalidationMode.TIMESTAMP:  # the compiled file has the size of its source
        compiled = Path(py_compile.compile.__globals__["importlib"].util.cache_from_source(str(source)))
        content = bytearray(compiled.read_bytes())
        content[12:16] = len(good).to_bytes(4, "little")
        compiled.write_bytes(content)
    assert import_file(helped / "sources/own.py", "use").VALUE == 1
    assert not (tmp_path / "mark").exists()


def test_a_compiled_file_without_a_source_is_not_run(run, tmp_path):
    (run / "sources/own.py").write_text("import helper_compiled\n")
    (tmp_path / "helper_compiled.py").write_text(leave_mark(tmp_path / "mark"))
    py_compile.compile(str(tmp_path / "helper_compiled.py"), cfile=str(run / "sources/helper_compiled.pyc"))
    approve_code(run)
    guard_folder(run)
    with pytest.raises(ConfigError, match="No module named 'helper_compiled'"):
        import_file(run / "sources/own.py", "use")
    assert not (tmp_path / "mark").exists()


def test_guarded_folders_get_no_compiled_files(helped):
    import_file(helped / "sources/own.py", "use")
    assert not list(helped.rglob("*.pyc"))


def test_a_module_that_appears_beside_approved_code_is_not_run(helped, tmp_path):
    (helped / "sources/own.py").write_text("def late():\n    import helper_late\n")
    approve_code(helped)
    own = import_file(helped / "sources/own.py", "use")
    (helped / "sources/helper_late.py").write_text(leave_mark(tmp_path / "mark"))
    with pytest.raises(ConfigError, match=r"import helper_late.*NONET_TRUST"):
        own.late()
    assert not (tmp_path / "mark").exists()


def test_a_folder_that_python_searched_before_it_was_guarded_is_guarded_too(helped, tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "_guarded", {})
    sys.path_importer_cache.clear()
    sys.path.insert(0, str(helped / "sources"))
    with pytest.raises(ImportError):
        __import__("helper_missing")
    (helped / "sources/helper_new.py").write_text(leave_mark(tmp_path / "mark"))
    guard_folder(helped)
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        __import__("helper_new")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("swap", ["a file", "a link", "the folder"])
def test_what_changes_between_the_check_and_the_import_is_not_run(helped, tmp_path, monkeypatch, swap):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own.py").write_text(leave_mark(tmp_path / "mark"))
    own = helped / "sources/own.py"

    def read_then_swap(folder):
        parts = read_code_parts(folder)
        if swap == "a file":
            own.write_text((elsewhere / "own.py").read_text())
        elif swap == "a link":
            own.unlink()
            own.symlink_to(elsewhere / "own.py")
        else:
            (helped / "sources").rename(tmp_path / "before")
            (helped / "sources").symlink_to(elsewhere)
        monkeypatch.setattr(trust, "read_code_parts", read_code_parts)
        return parts

    monkeypatch.setattr(trust, "read_code_parts", read_then_swap)
    with pytest.raises(ConfigError, match="changed while it was imported"):
        import_file(own, "use")
    assert not (tmp_path / "mark").exists()


def test_a_folder_that_becomes_a_link_after_the_check_leads_to_no_other_module(helped, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "helper.py").write_text(leave_mark(tmp_path / "mark"))

    def read_then_swap(file, title):
        content = read_code(file, title)
        (helped / "sources").rename(tmp_path / "before")
        (helped / "sources").symlink_to(elsewhere)
        return content

    monkeypatch.setattr("nonet.plugins.read_code", read_then_swap)
    with pytest.raises(ConfigError, match="import helper"):
        import_file(helped / "sources/own.py", "use")
    assert not (tmp_path / "mark").exists()


def test_links_to_folders_are_no_code(helped, tmp_path):
    (tmp_path / "elsewhere/helpers").mkdir(parents=True)
    (tmp_path / "elsewhere/helpers/__init__.py").write_text(leave_mark(tmp_path / "mark"))
    (helped / "sources/helpers").symlink_to(tmp_path / "elsewhere/helpers")
    (helped / "sources/own.py").write_text("import helpers\n")
    approve_code(helped)
    with pytest.raises(ConfigError, match="is not part of the code"):
        import_file(helped / "sources/own.py", "use")
    assert not (tmp_path / "mark").exists()


def test_an_extension_beside_approved_code_is_loaded_from_the_bytes_that_were_checked(run, tmp_path):
    import _json  # any extension, whose init function has the name of its file

    library = getattr(_json, "__file__", None)
    if library is None:
        pytest.skip("this Python has no extension files")
    (run / "sources" / Path(library).name).write_bytes(Path(library).read_bytes())
    approve_code(run)
    guard_folder(run)
    finder = trust._find_in_guarded_folder(str(run / "sources"))
    found = finder.find_spec("_json")
    assert isinstance(found.loader, trust._GuardedExtensionLoader)
    (run / "sources" / Path(library).name).write_bytes(b"other")
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        found.loader.create_module(found)


def test_a_folder_without_code_is_never_approved(tmp_path):
    folder = tmp_path / "empty"
    (folder / "sources/__pycache__").mkdir(parents=True)
    (folder / "sources.json").write_text("[]")
    guard_folder(folder)
    approve_code(folder)
    assert compute_code_hash(folder) == ""
    assert not is_approved(folder)
    (folder / "sources/__pycache__/x.pyc").write_bytes(b"")
    with pytest.raises(ConfigError, match="is not part of the code"):
        read_code(folder / "sources/__pycache__/x.pyc", "use")


@pytest.mark.parametrize(
    "copy", ["/etc/evil.py", "../evil.py", "a/../../evil.py", "a//evil.py", "./evil.py", "link/evil.py"]
)
def test_the_list_of_copies_leads_to_no_other_folder(run, tmp_path, copy):
    (run / "sources/link").symlink_to(tmp_path)
    (run / "sources.json").write_text(json.dumps([{"use": "evil.py", "copy": copy, "sha256": ""}]))
    with pytest.raises(ConfigError, match="leads out of"):
        read_copy_records(run)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [None, "[" * 200_000, "3", "[3]", '[{"use": 1}]'])
def test_a_list_of_copies_that_is_a_pipe_or_damaged_is_named(run, content):
    file = run / "sources.json"
    file.unlink(missing_ok=True)
    os.mkfifo(file) if content is None else file.write_text(content)
    with pytest.raises(ConfigError, match=r"sources\.json is (damaged|no regular file)"):
        read_copy_records(run)


@pytest.mark.parametrize("use", ["{out}", "../../out.py", "link.py"])
@pytest.mark.parametrize("has_list", [True, False])
def test_the_scenario_of_a_run_names_no_file_outside_of_it(run, tmp_path, use, has_list):
    (tmp_path / "out.py").write_text(leave_mark(tmp_path / "mark") + "SPEC = None\n")
    use = use.format(out=tmp_path / "out.py")
    for folder in (run, run / "sources"):
        (folder / "link.py").symlink_to(tmp_path / "out.py")
    if has_list:
        (run / "sources.json").write_text("[]")
    (run / "scenario.yaml").write_text(
        f"name: x\ndata: {{interactions: movielens-small}}\ntokenizer: {{use: '{use}:SPEC'}}\nstages: {{pretrain: {{}}}}\n"
    )
    guard_folder(run)
    approve_code(run)
    with pytest.raises(ConfigError, match="leads out of"):
        load_scenario(run / "scenario.yaml")
    assert not (tmp_path / "mark").exists()


def name_module(run: Path, use: str) -> None:
    """Write a scenario that names a module."""
    (run / "scenario.yaml").write_text(
        f"name: x\ndata: {{interactions: movielens-small}}\ntokenizer: {{use: '{use}'}}\nstages: {{pretrain: {{}}}}\n"
    )


def test_a_module_that_a_run_names_is_imported_only_if_it_is_approved(run, tmp_path, monkeypatch):
    (tmp_path / "helper_module.py").write_text(leave_mark(tmp_path / "mark") + "SPEC = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    name_module(run, "helper_module:SPEC")
    guard_folder(run)
    with pytest.raises(ConfigError, match=rf"\(helper_module:SPEC\).*NONET_TRUST={compute_code_hash(run)}"):
        load_scenario(run / "scenario.yaml")
    assert not (tmp_path / "mark").exists()
    approve_code(run)
    with pytest.raises(ConfigError, match="helper_module"):  # it is imported, and is no tokenizer
        load_scenario(run / "scenario.yaml")
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("load", [find_reward, lambda use: load_reference(use, PluginFiles(), "use")])
def test_any_callable_that_a_run_names_is_asked_for(run, load):
    name_module(run, "subprocess:getoutput")
    guard_folder(run)
    add_references(run, {"stages": {"rl": {"rewards": {"own": {"use": "subprocess:getoutput"}}}}})
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        load("subprocess:getoutput")
    approve_code(run)
    assert load("subprocess:getoutput") is subprocess.getoutput


def test_another_name_in_the_scenario_needs_another_approval(run):
    name_module(run, "json:loads")
    approve_code(run)
    name_module(run, "subprocess:getoutput")
    guard_folder(run)
    add_references(run, {"use": "subprocess:getoutput"})
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        check_reference("subprocess:getoutput", "use")


def test_a_scenario_that_is_put_back_after_it_was_read_is_refused(run):
    name_module(run, "json:loads")
    approve_code(run)
    guard_folder(run)
    add_references(run, {"use": "subprocess:getoutput"})  # what was read, and is not on disk any more
    with pytest.raises(ConfigError, match="changed while it was opened"):
        check_reference("subprocess:getoutput", "use")
    with pytest.raises(ConfigError, match="changed while it was opened"):
        read_code(run / "sources/evil.py", "use")


def test_a_command_that_only_reads_imports_no_module_that_a_run_names(run):
    name_module(run, "json:loads")
    approve_code(run)
    guard_folder(run)
    with import_no_code(), pytest.raises(ConfigError, match="which this command does not run"):
        load_scenario(run / "scenario.yaml")


def test_the_scenario_of_a_run_extends_no_other(run, tmp_path):
    (tmp_path / "base.yaml").write_text("tokenizer: {use: 'json:loads'}\n")
    (run / "scenario.yaml").write_text(f"extends: {tmp_path / 'base.yaml'}\nname: x\n")
    guard_folder(run)
    with pytest.raises(ConfigError, match="extends no other"):
        load_scenario(run / "scenario.yaml")


def test_the_interpreter_of_a_pool_is_approved_like_code(run):
    (run / "sources/evil.py").unlink()
    (run / "scenario.yaml").write_text("pools: {a: {env: {python: /bin/sh}}}\n")
    guard_folder(run)
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        check_folder(run, "run")
    approve_code(run)
    check_folder(run, "run")
    (run / "scenario.yaml").write_text("pools: {a: {env: {python: /bin/bash}}}\n")
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        check_folder(run, "run")


@pytest.mark.parametrize(
    "use", ["this: x", "this:x\n", "this:a/b", "this:a:b", " this:x", "own file.py :X", "a\nb.py:X"]
)
def test_a_text_that_guards_would_not_know_as_a_reference_is_never_imported(run, use):
    assert use not in list_references({"use": use})
    for load in (lambda: load_reference(use, PluginFiles(run), "use"), lambda: find_reward(use, run)):
        with pytest.raises(ConfigError, match="is no reference; write"):
            load()
    assert "this" not in sys.modules


@pytest.mark.parametrize("inside", [False, True])
def test_a_stored_model_names_no_code_that_its_approved_scenario_does_not(run, tmp_path, inside):
    outside = (run / "sources" if inside else tmp_path) / "other.py"
    outside.write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\nSPEC = 1\n")
    approve_code(run)
    guard_folder(run)
    add_stored_references(run / "checkpoints/step-1/clicks/model.json", {"use": f"{outside}:SPEC"})
    if inside:
        add_stored_references(run / "checkpoints/step-1/clicks/model.json", {"use": "sources/other.py:SPEC"})
        assert load_reference(f"{outside}:SPEC", PluginFiles(), "use") == 1
        return
    with pytest.raises(ConfigError, match=f"it named {outside}"):
        load_reference(f"{outside}:SPEC", PluginFiles(), "use")
    assert not (tmp_path / "mark").exists()


def test_a_reward_that_reads_the_run_of_somebody_else_asks_for_its_approval(run):
    (run / "checkpoints/step-000001/clicks").mkdir(parents=True)
    (run / "checkpoints/step-000001/clicks/model.json").write_text("{}")
    for model in (run, run / "checkpoints/step-000001"):
        with pytest.raises(ConfigError, match="NONET_TRUST"):
            PredictedClick(str(model))
    approve_code(run)
    assert PredictedClick(str(run)).folder == run / "checkpoints/step-000001"


def test_an_environment_that_is_swapped_after_it_was_read_is_refused(run):
    (run / "scenario.yaml").write_text("pools: {a: {env: {python: /usr/bin/python3}}}\n")
    approve_code(run)
    guard_folder(run)
    add_references(run, {"pools": {"a": {"env": {"python": "/tmp/evil"}}}})
    with pytest.raises(ConfigError, match="changed while it was opened"):
        check_folder(run, "run")


def test_keys_of_a_scenario_may_name_code_too(run):
    assert list_references({"own.py:SPEC": {"http://a": 1}}) == {"own.py:SPEC", "http://a"}


def test_only_this_user_reads_and_writes_the_approvals(run, tmp_path):
    approve_code(run)
    assert (tmp_path / "config/nonet/trusted").stat().st_mode & 0o077 == 0


def test_the_variable_whose_value_a_server_gets_is_approved_with_the_server(run):
    scenario = "rewards: {{own: {{use: 'http://a.example', token: {}}}}}\n"
    (run / "scenario.yaml").write_text(scenario.format("FRESH_TOKEN"))
    approve_code(run)
    guard_folder(run)
    check_folder(run, "run")
    (run / "scenario.yaml").write_text(scenario.format("AWS_SECRET_ACCESS_KEY"))
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        check_folder(run, "run")


@pytest.mark.parametrize(
    "use",
    [
        "http://evil.example/score",
        "REDIS://evil.example:6379/0",
        "http://evil.example/score ",
        "\thttp://evil.example\n",
        "actor://space/na me",
        "s3://bucket/x?endpoint_override=evil.example",
    ],
)
def test_a_server_that_a_run_asks_is_approved_like_code(run, use):
    (run / "sources/evil.py").unlink()
    (run / "sources.json").write_text("[]")
    (run / "scenario.yaml").write_text(json.dumps({"stages": {"rl": {"rewards": {"own": {"use": use}}}}}))
    guard_folder(run)
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        check_folder(run, "run")
    approve_code(run)
    check_folder(run, "run")


def test_keys_of_an_environment_need_not_be_texts(run):
    (run / "scenario.yaml").write_text("pools: {a: {env: {1: x, a: [{2: y, b: z}]}}}\n")
    guard_folder(run)
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        check_folder(run, "run")


def test_a_run_without_code_needs_no_approval(run):
    (run / "sources/evil.py").unlink()
    (run / "sources.json").write_text("[]")
    (run / "scenario.yaml").write_text(
        "name: x\nstart: '12:30'\nstorage: s3://runs\ndata: {items: 's3://a/b.parquet'}\n"
    )
    guard_folder(run)
    check_folder(run, "run")


@pytest.mark.parametrize(
    "use", ["subprocess:getoutput", "attached-1/own.py:f", "/tmp/evil.py:f", "http://evil.example"]
)
def test_a_reward_that_somebody_else_attaches_is_refused(run, use):
    approve_code(run)
    guard_folder(run)
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        check_attached(run, use, "attach")
    check_attached(run, "novelty", "attach")
    approve_parts([CodePart(references={use})])
    check_attached(run, use, "attach")


def test_attached_rewards_are_parts_of_the_code_of_a_run(run):
    approve_code(run)
    (run / "sources/attached-1").mkdir()
    (run / "sources/attached-1/own.py").write_text("VALUE = 1\n")
    records = [{"verb": "attach", "options": {"use": "attached-1/own.py:f"}}, {"verb": "set"}]
    records += [{"verb": "attach", "options": {"use": "json:loads"}, "refused": "why"}]
    (run / "commands.jsonl").write_text(
        "".join(json.dumps({"crc": 0, "r": record}) + "\n" for record in records)
    )
    guard_folder(run)
    assert set(read_code_parts(run)) == {"", "sources/attached-1", "attached-1/own.py:f"}
    import_file(run / "sources/evil.py", "use")  # its own part is approved
    for check in (
        lambda: read_code(run / "sources/attached-1/own.py", "use"),
        lambda: check_folder(run, "run"),
    ):
        with pytest.raises(ConfigError, match=f"NONET_TRUST={compute_code_hash(run)}"):
            check()
    approve_code(run)
    read_code(run / "sources/attached-1/own.py", "use")
    check_folder(run, "run")


def test_the_option_approves_nothing_that_comes_after_the_opening(run):
    trust.approve_opened_folders()
    guard_folder(run)
    (run / "sources/evil.py").write_text("VALUE = 2\n")
    guard_folder(run)
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        read_code(run / "sources/evil.py", "use")


def test_the_work_folder_of_a_run_needs_the_approval_of_its_view(run, tmp_path):
    trust.approve_opened_folders()
    guard_folder(run, is_view=True)
    add_references(run, {"use": "json:loads"})
    work = tmp_path / "work"
    (work / "sources").mkdir(parents=True)
    (work / "scenario.yaml").write_text("name: x")
    (work / "sources/evil.py").write_text("other\n")
    guard_work_folder(work, run)
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        check_folder(work, "run")
    assert str(work) in list_trust().references
    assert list_trust().references[str(work)] == ["json:loads"]
    assert str(run) not in list_trust().references


@pytest.mark.parametrize("change", [False, True])
def test_a_worker_checks_the_code_that_it_loads(helped, tmp_path, change):
    """A process of another node, which remembers nothing, knows what the process that started it has approved."""
    check_folder(helped, "run")
    if change:
        (helped / "sources/helper.py").write_text(leave_mark(tmp_path / "mark") + "VALUE = 1\n")
    code = (
        "import json, sys; from pathlib import Path; from nonet.plugins import import_file; from nonet.trust import *\n"
        "from nonet.trust import TrustState, take_trust; take_trust(TrustState(**json.loads(sys.argv[1])))\n"
        "print(import_file(Path(sys.argv[2]), 'use').VALUE)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asdict(list_trust())), str(helped / "sources/own.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_CONFIG_HOME": str(tmp_path / "nobody")},
    )
    assert (done.stdout, "NONET_TRUST" in done.stderr) == (("", True) if change else ("1\n", False)), (
        done.stderr
    )
    assert not (tmp_path / "mark").exists()


def test_a_child_process_that_unpickles_a_function_checks_modules_beside_its_file(helped, tmp_path):
    module = import_file(helped / "sources/own.py", "use")
    (helped / "sources/helper.py").write_text(leave_mark(tmp_path / "mark") + "VALUE = 1\n")
    code = f"import sys; sys.path[:0] = {sys.path!r}; import {module.__name__}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "NONET_TRUST" in done.stderr
    assert not (tmp_path / "mark").exists()


def test_an_export_names_a_file_outside_of_it_only_if_it_is_approved(tmp_path):
    export = tmp_path / "export"
    export.mkdir()
    (tmp_path / "out.py").write_text(leave_mark(tmp_path / "mark") + "build = 1\n")
    use = f"{tmp_path / 'out.py'}:build"
    settings = {"setup": {"model": {"use": use}}, "joins": {}}
    (export / "export.json").write_text(json.dumps(settings))
    guard_folder(export)
    add_references(export, settings)
    with pytest.raises(ConfigError, match="NONET_TRUST"):
        load_reference(use, PluginFiles(), "model.use")
    assert not (tmp_path / "mark").exists()
    approve_code(export)
    assert load_reference(use, PluginFiles(), "model.use") == 1


def test_a_script_in_a_guarded_folder_can_be_run(run, tmp_path):
    guard_folder(run)
    runpy.run_path(str(run / "sources/evil.py"))  # as the user does who runs the example of an export
    assert (tmp_path / "mark").exists()


@pytest.fixture
def serving(run) -> Path:
    """The serving folder of a run of somebody else that names an address for its versions."""
    (run / "serving").mkdir()
    (run / "serving/registry.uri").write_text("s3://theirs/movies\n")
    return run / "serving"


def test_an_address_for_versions_that_came_with_a_run_is_not_used_before_it_is_approved(
    run, serving, monkeypatch
):
    check_registry(serving, "s3://theirs/movies")  # a folder of the user's own choice
    guard_folder(run)
    with pytest.raises(
        ConfigError, match=r"registry.uri names s3://theirs/movies, .*NONET_TRUST=\w{32}; if not"
    ) as error:
        check_registry(serving, "s3://theirs/movies")
    (own_hash,) = re.findall(r"NONET_TRUST=(\w+)", str(error.value))
    approve_code(run)
    monkeypatch.setenv("NONET_TRUST", compute_code_hash(run))
    with pytest.raises(ConfigError, match="names s3://theirs"):  # whoever approves code approves no address
        check_registry(serving, "s3://theirs/movies")
    assert is_approved(run)
    monkeypatch.setenv("NONET_TRUST", own_hash)
    check_registry(serving, "s3://theirs/movies")
    with pytest.raises(ConfigError, match="names s3://others"):
        check_registry(serving, "s3://others/movies")


def test_an_address_that_the_user_has_given_is_approved_for_one_folder(run, serving, tmp_path):
    guard_folder(run)
    approve_registry(serving, "s3://mine/movies")
    check_registry(serving, "s3://mine/movies")
    other = tmp_path / "run-2" / "serving"
    other.mkdir(parents=True)
    guard_folder(other.parent)
    with pytest.raises(ConfigError, match="names s3://mine/movies"):
        check_registry(other, "s3://mine/movies")


def test_an_address_for_versions_does_not_keep_workers_from_running(run, serving):
    guard_folder(run)
    approve_code(run)
    check_folder(run, "a run")


@pytest.mark.parametrize("content", [b"x" * 5000, b"s3://a\nb", b"s3://a\0b"])
def test_a_damaged_address_for_versions_is_named(run, serving, content):
    (serving / "registry.uri").write_bytes(content)
    with pytest.raises(ConfigError, match=r"registry.uri is not the address of a registry"):
        read_registry_address(serving / "registry.uri")
