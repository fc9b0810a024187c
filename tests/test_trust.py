"""Code of runs and exports is run only if this user has started or approved it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nonet import trust
from nonet.errors import ConfigError
from nonet.plugins import import_file
from nonet.trust import (
    approve_code,
    compute_code_hash,
    guard_folder,
    import_no_code,
    is_approved,
    read_code,
)


@pytest.fixture(autouse=True)
def forget(tmp_path, monkeypatch):
    """Guard no folder before and after a test, and approve nothing."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_guarded", {})
    monkeypatch.setattr(trust, "_approved", set())
    monkeypatch.setattr(trust, "_settings", {"approves": False, "imports": True})


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


def test_a_command_that_only_reads_imports_no_code_not_even_approved_code(run):
    guard_folder(run)
    approve_code(run)
    with import_no_code(), pytest.raises(ConfigError, match="which this command does not run"):
        read_code(run / "sources/evil.py", "use")
    read_code(run / "sources/evil.py", "use")


def test_files_of_the_user_need_no_approval(run, tmp_path):
    guard_folder(run)
    (tmp_path / "own.py").write_text("")
    import_file(tmp_path / "own.py", "use")
