"""The host of roles, without Ray: what a role raises becomes an error that names the worker."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nonet.errors import WorkerFailed
from nonet.workers.runtime.host import WorkerActor
from nonet.workers.runtime.worker import Place


def test_a_role_that_calls_exit_fails_its_call_and_does_not_end_the_process():
    host = object.__new__(WorkerActor.__ray_metadata__.modified_class)
    host._place = Place(role="probe")
    host._location = SimpleNamespace(node="here", devices=())
    host._orphan_guard = SimpleNamespace(record_heartbeat=lambda: None)
    host._spans = SimpleNamespace(add=lambda *span: None)
    with pytest.raises(WorkerFailed, match=r"probe-0@here: setup raised SystemExit: gone") as error:
        host._run_guarded("probe.setup", sys.exit, ("gone",), {})
    assert (error.value.role, error.value.exit_code) == ("probe", 1)
