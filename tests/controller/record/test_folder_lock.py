from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest

from nonet.controller.record.folder_lock import HOLDER, lock_folder
from nonet.controller.record.run_folder import create_run, lock_run
from nonet.errors import ConfigError


@pytest.fixture(params=["locks", "no locks"])
def filesystem(request, monkeypatch):
    if request.param == "no locks":

        def refuse(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param


def test_a_folder_is_held_by_one_at_a_time_with_and_without_locks(filesystem, tmp_path):
    held = lock_folder(tmp_path)
    with pytest.raises(ConfigError, match="is being run by"):
        lock_folder(tmp_path)
    held.close()
    held.close()
    with lock_folder(tmp_path), pytest.raises(ConfigError, match="is being run by"):
        lock_folder(tmp_path)
    lock_folder(tmp_path).close()


def test_a_failed_hold_keeps_no_descriptor(filesystem, tmp_path):
    with lock_folder(tmp_path):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with pytest.raises(ConfigError):
                lock_folder(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("filesystem", ["no locks"], indirect=True)
class TestWithoutLocks:
    def test_a_dead_holder_of_this_host_is_passed_over(self, filesystem, tmp_path):
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE
        )
        (tmp_path / HOLDER).write_text(f"{socket.gethostname()} {int(child.stdout)} boot 12345")
        lock_folder(tmp_path).close()
        assert not (tmp_path / HOLDER).exists()

    def test_a_number_that_another_process_has_got_since_is_no_holder(self, filesystem, tmp_path):
        (tmp_path / HOLDER).write_text(f"{socket.gethostname()} {os.getpid()} another-boot 12345")
        lock_folder(tmp_path).close()

    def test_a_holder_on_another_host_is_named_with_the_file_to_remove(self, filesystem, tmp_path):
        (tmp_path / HOLDER).write_text("n17 4321 boot 12345")
        with pytest.raises(ConfigError, match=r"held by process 4321 of host n17, .* remove .*\.holder"):
            lock_folder(tmp_path)

    def test_a_run_s_folder_is_held_there_too_and_counts_as_empty(self, filesystem, tmp_path):
        run = create_run("x", tmp_path / "aa-1")
        held = lock_run(run)
        assert (run.path / HOLDER).exists()
        assert create_run("x", run.path).id == "aa-1"
        with pytest.raises(ConfigError, match="is being run by"):
            lock_run(run)
        held.close()
