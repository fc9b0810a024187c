"""How a call's values become parameters, and what is said where a value does not come. No Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from nonet.deadlines import Deadline
from nonet.errors import DeadlineExceeded
from nonet.workers.runtime import host as hosts
from nonet.workers.runtime.dispatch import SHARE, Argument, assemble_arguments, pack_header
from nonet.workers.runtime.worker import Place

SHARED = (Argument("rows", SHARE, 2),)


def test_a_share_fetches_the_chunks_that_hold_its_rows_by_the_parameters_name():
    fetched = []

    def fetch(parameter, refs):
        fetched.append((parameter, list(refs)))
        return [{"a": [0, 1, 2], "b": [3, 4]}[ref] for ref in refs]

    flat = [3, 2, ["a", "b"]]
    assert assemble_arguments(SHARED, flat, 0, 2, fetch) == {"rows": [0, 1, 2]}
    assert assemble_arguments(SHARED, flat, 1, 2, fetch) == {"rows": [3, 4]}
    assert fetched == [("rows", ["a"]), ("rows", ["b"])]


def test_a_chunk_that_does_not_come_is_a_deadline_that_names_call_parameter_and_key(monkeypatch):
    waits = []

    def never(refs, timeout=None):
        waits.append(timeout)
        raise GetTimeoutError("late")

    monkeypatch.setattr(hosts.ray, "get", never)
    cls = hosts.WorkerActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    worker = cls.__new__(cls)
    worker._place = Place("trainer", 1, 2, deadline_s=Deadline(7.0, "deadlines.step"))
    worker._location = SimpleNamespace(node="n", devices=())
    worker._context = SimpleNamespace(get_task_name=lambda: "trainer.update")
    with pytest.raises(
        DeadlineExceeded,
        match=r"trainer-1@n: trainer\.update: 1 chunks of 'rows' .* 7 s; raise deadlines\.step",
    ):
        worker._assemble_arguments(pack_header(SHARED), [3, 2, ["a", "b"]])
    assert waits == [7.0]
