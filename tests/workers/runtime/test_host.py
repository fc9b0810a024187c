"""The host of roles, without Ray: what a role raises becomes an error that names the worker."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nonet.errors import WorkerFailed
from nonet.storage import MountedRun
from nonet.workers.runtime.host import WorkerActor
from nonet.workers.runtime.worker import Place
from tests.storage.memory_storage import MemoryStorage


def test_a_role_that_calls_exit_fails_its_call_and_does_not_end_the_process():
    host = object.__new__(WorkerActor.__ray_metadata__.modified_class)
    host._place = Place(role="probe")
    host._location = SimpleNamespace(node="here", devices=())
    host._orphan_guard = SimpleNamespace(record_heartbeat=lambda: None)
    host._spans = SimpleNamespace(add=lambda *span: None)
    with pytest.raises(WorkerFailed, match=r"probe-0@here: setup raised SystemExit: gone") as error:
        host._run_guarded("probe.setup", sys.exit, ("gone",), {})
    assert (error.value.role, error.value.exit_code) == ("probe", 1)


def test_what_calls_make_after_a_cut_has_its_generation_and_what_a_running_call_makes_has_not(
    tmp_path, monkeypatch
):
    host = object.__new__(WorkerActor.__ray_metadata__.modified_class)
    names = type(host).begin_generation.__wrapped__.__globals__  # behind what Ray puts around a method
    copy = names["RunCopy"](MountedRun("s3://runs/a", str(tmp_path / "a"), 1, 7), MemoryStorage())
    monkeypatch.setitem(names, "find_copy", {tmp_path / "a": copy}.get)
    host.begin_generation(str(tmp_path / "elsewhere"), 8)
    assert copy.generation == 7
    host.begin_generation(str(tmp_path / "a"), 8)
    assert copy.generation == 8
    copy.release()
    groups = {
        name: getattr(type(host), name).__ray_concurrency_group__ for name in ("begin_generation", "call")
    }
    assert groups == dict.fromkeys(groups, "work")  # one queue, in the order of the calls
