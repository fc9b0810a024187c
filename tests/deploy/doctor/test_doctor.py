from __future__ import annotations

import json
import socket
import sys
from types import SimpleNamespace

import pytest

from nonet.deploy.doctor import doctor
from nonet.deploy.doctor.doctor import (
    FAILURE,
    OK,
    WARNING,
    MachineCheck,
    _is_within_bounds,
    examine,
    format_checks,
)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NONET_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def found() -> dict[str, MachineCheck]:
    return {check.name: check for check in examine()}


def test_a_machine_that_runs_these_tests_is_ready(capsys):
    checks = found()
    assert [check for check in checks.values() if check.state == FAILURE] == []
    assert {"python", "torch", "ray", "cores", "memory", "runs folder"} <= set(checks)
    assert doctor.main(True) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == set(checks)


def test_each_lack_is_named_with_its_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "version", lambda name: "0.0.1")
    (tmp_path / "file").write_text("")
    checks = found()
    assert checks["torch"].state == FAILURE
    assert "is needed" in checks["torch"].advice
    assert checks["compiler"].state == WARNING
    assert "NumPy" in checks["compiler"].advice
    broken = [check for check in examine() if check.name == "ray"]
    assert "no Ray cluster answers" in broken[-1].found
    assert doctor.main(True) == 1


def test_a_busy_port_of_serve_is_a_warning(monkeypatch):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        monkeypatch.setattr(doctor, "_SERVE_PORT", busy.getsockname()[1])
        check = found()["port"]
    assert check.state == WARNING
    assert "choose another port with --port" in check.found
    monkeypatch.setattr(doctor, "_SERVE_PORT", 0)
    assert found()["port"].state == OK


def test_versions_are_compared_as_numbers():
    assert _is_within_bounds("2.13.0+cpu", ">=2.9,<2.14")
    assert not _is_within_bounds("2.14.0", ">=2.9,<2.14")
    assert not _is_within_bounds("2.8.9", ">=2.9,<2.14")
    assert _is_within_bounds("2.60.0", "<2.61,>=2.56")


def test_the_verdict_counts_failures_and_warnings():
    lines = format_checks(
        [
            MachineCheck("a", OK, "1"),
            MachineCheck("b", WARNING, "2", "do this"),
            MachineCheck("c", FAILURE, "3"),
        ]
    )
    assert "warning  b  2: do this" in lines
    assert lines.endswith("not ready: 1 failure, 1 warning")
