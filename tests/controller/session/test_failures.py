"""How a run that an error ends is described: a full disk is one line that names the folder."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from nonet.controller.single_controller import SingleController
from nonet.errors import ConfigError, WorkerFailed, is_disk_full

Conductor = SingleController.__ray_metadata__.modified_class  # type: ignore[attr-defined]
FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded", "trace.json"),
    WorkerFailed(
        "trainer-0: save raised SafetensorError: I/O error: No space left on device (os error 28)",
        traceback="t",
    ),
]


@pytest.mark.parametrize("error", FULL)
def test_a_full_disk_is_one_line_that_names_the_folder_and_the_next_step(tmp_path, error):
    run = SimpleNamespace(_run=SimpleNamespace(path=tmp_path, id="tiny-1"))
    outcome = Conductor._describe_failure(run, error)
    assert is_disk_full(error)
    assert (outcome["exit_code"], outcome["traceback"], "\n" in outcome["error"]) == (1, "", False)
    for part in ("a disk is full", str(tmp_path), "MB free", "nonet resume tiny-1"):
        assert part in outcome["error"]


def test_other_errors_keep_their_traceback_and_their_exit_code():
    outcome = Conductor._describe_failure(None, WorkerFailed("gone", traceback="where"))
    assert (outcome["error"], outcome["traceback"], outcome["exit_code"]) == ("gone", "where", 1)
    assert Conductor._describe_failure(None, ConfigError("wrong"))["exit_code"] == 2
    try:
        raise OSError(errno.EIO, "broken")
    except OSError as error:
        outcome = Conductor._describe_failure(None, error)
    assert "OSError: [Errno 5] broken" in outcome["error"]
    assert "Traceback" in outcome["traceback"]
