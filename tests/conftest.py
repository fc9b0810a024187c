"""Shared fixtures: one local Ray a session (with xdist, one a worker), ended with it; one torch thread; no process is left."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

# What stands beside the tests of a folder (worlds, scenarios) is imported by its name. The stand-in for torch_npu is put on
# the path by the tests that want it: everybody else must find none.
sys.path[:0] = [
    str(folder)
    for folder in (Path(__file__).parent, *Path(__file__).parent.iterdir())
    if folder.is_dir() and folder.name != "npu_standin"
]

# Every process that a test starts inherits it, so what is left in the end can be told from other people's processes. A pytest
# that a test starts has it already, and does not look.
_OUTERMOST = "NONET_TEST_SESSION" not in os.environ
os.environ.setdefault("NONET_TEST_SESSION", f"{os.getpid()}-{time.time_ns()}")
_GONE_S = 60.0

# What these tests approve is forgotten with them, and what their user has approved is not known to them.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="nonet-tests-")
os.environ.pop("NONET_TRUST", None)
# Nor do they see the stored runs that their user has used.
os.environ["NONET_CACHE"] = f"{os.environ['XDG_CONFIG_HOME']}/cache"

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
# Ray starts workers with the niceness 15. Those of one process of xdist would get a thirtieth of a core that another process
# computes on, so a run that takes 20 s alone would take minutes, and meet its deadlines.
os.environ.setdefault("RAY_worker_niceness", "0")


# A worker of Ray takes seconds of computing for its imports, and the tests start more than a thousand.
importlib.import_module("forked_workers").install()
# Nonet compiles its core in each of the caches that tests give to its processes.
importlib.import_module("cached_compiler").install(Path(os.environ["XDG_CONFIG_HOME"]) / "bin")

# Folders whose files take longest, because their tests start processes or run Triton's interpreter. They come first, so that
# at the end of a session no process of xdist is left alone with one of them.
_LONG = ("deploy", "workers", "attention", "controller")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests by folder, the longest folders first."""
    here = Path(__file__).parent

    def get_rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0]
        return _LONG.index(folder) if folder in _LONG else len(_LONG)

    items.sort(key=get_rank)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was imported so far: a million objects, which no test releases."""
    gc.collect()
    gc.freeze()


def start_local_ray():
    """Start a local Ray of four CPUs, never joining a cluster that happens to run."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        namespace="nonet",
        object_store_memory=200_000_000,
    )
    return ray


@pytest.fixture(scope="session")
def ray_local():
    """Provide the session's local Ray."""
    ray = start_local_ray()
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def no_ray():
    """Shut Ray down in this process while a module's tests run, and start the session's again after them."""
    import ray

    before = ray.is_initialized()
    ray.shutdown()
    yield
    ray.shutdown()
    if before:
        start_local_ray()


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""
    from nonet.deploy import cli

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nonet", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(autouse=True)
def forgotten_guards(monkeypatch):
    """Forget the runs that a test has guarded, which every worker of a later test would have to guard too."""
    from nonet import trust

    for name in ("_guarded", "_views"):
        monkeypatch.setattr(trust, name, getattr(trust, name).copy())


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Use one torch thread: the tensors are tiny, and threads that wait for a busy core are a hundred times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def forked_roles_end():
    """End the process that tests/workers/forked_roles.py forks ranks from, if a test has started it."""
    yield
    if module := sys.modules.get("forked_roles"):
        module.end_server()


def left_over() -> list[str]:
    """Return the processes that this session's tests started and that are still running: id and command."""
    mark = f"NONET_TEST_SESSION={os.environ['NONET_TEST_SESSION']}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                words = (folder / "cmdline").read_bytes().split(b"\0")
                found.append(f"{folder.name} {b' '.join(words).decode(errors='replace')[:120]}")
        except OSError:  # it ended meanwhile
            continue
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a process is left a minute after the last test, and name it; of xdist's workers only their chief looks."""
    importlib.import_module("forked_workers").end()
    shutil.rmtree(os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
    if hasattr(session.config, "workerinput") or not _OUTERMOST:
        return
    until = time.monotonic() + _GONE_S
    while (left := left_over()) and time.monotonic() < until:
        time.sleep(0.2)
    if left:
        print("\nprocesses that tests left:", *left, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
