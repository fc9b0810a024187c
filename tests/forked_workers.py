"""Ray's workers as forks of one process that has imported torch, Arrow and the roles, so that each starts in a third of a second.

    forked_workers.install()         # in the process that starts Ray: a worker that Ray starts from now on is a fork
    python forked_workers.py SOCKET  # the server, which ends when its stdin is closed
    python forked_workers.py --language=... worker.py ...  # what Ray runs in place of its setup_worker.py: asks the server

Ray itself is not imported before the fork, because it reads the environment of its worker when it is imported. A worker in an
environment of its own (another interpreter, a container, other sources of Nonet) is started as Ray would start it.
"""

from __future__ import annotations

import array
import gc
import importlib.abc
import importlib.machinery
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SOCKET, _REAL_SETUP, _SOURCES = "NONET_TEST_FORKS", "NONET_TEST_REAL_SETUP", "NONET_TEST_SOURCES"
_CONTEXT = "--serialized-runtime-env-context="
_IMPORTED = ("nonet.workers.roles.trainer", "nonet.workers.roles.artifacts.tokenizer", "nonet.workers.engines._fsdp2",
             "nonet.workers.roles.evaluation.evaluator", "nonet.workers.roles.learners.policy",
             "nonet.models.sid_decoder.decoder", "google.protobuf", "yaml", "asyncio", "jsonschema", "packaging.version",
             "torch.distributed.device_mesh", "nonet.controller.plan.resolved", "torch.utils.tensorboard")  # fmt: skip
_START_S = 60.0


def install() -> None:
    """Let Ray, if this process starts it, start workers as forks; the server starts with the first Ray."""
    sys.meta_path.insert(0, _NodeFinder())


class _NodeFinder(importlib.abc.MetaPathFinder):
    """Changes `ray._private.node` when it is imported: a node's workers are set up by this file."""

    def find_spec(self, name, path, target=None):
        if name != "ray._private.node":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            start = module.Node.__init__

            def start_with_forks(self, ray_params, *args, **options):
                if not options.get("connect_only"):
                    _start_server(Path(module.__file__).parent / "workers" / "setup_worker.py")
                    ray_params.update_if_absent(setup_worker_path=__file__)
                start(self, ray_params, *args, **options)

            module.Node.__init__ = start_with_forks

        spec.loader.exec_module = execute_and_change
        return spec


def end() -> None:
    """End the server of this process, if it runs."""
    if _servers:
        _servers.pop().communicate()


_servers: list[Any] = []  # that of this process


def _start_server(real_setup: Path) -> None:
    """Start the server of this process, unless it runs; it ends with this process, which holds the other end of its stdin."""
    import subprocess  # not by every worker that asks
    import tempfile
    import time

    if _servers:
        return
    path = f"{tempfile.mkdtemp(prefix='nonet-forks-')}/socket"
    command = [sys.executable, __file__, path]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    _servers.append(server)
    os.environ[_SOCKET], os.environ[_REAL_SETUP] = path, str(real_setup)
    os.environ[_SOURCES] = os.pathsep.join(_list_sources(os.environ))
    until = time.monotonic() + _START_S
    while not os.path.exists(path) and server.poll() is None and time.monotonic() < until:
        time.sleep(0.02)


def _list_sources(environment: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH that have packages which the server has imported."""
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return [
        folder
        for folder in folders
        if any((Path(folder) / name).exists() for name in ("nonet", "torch", "ray"))
    ]


def _ask() -> None:
    """Ask the server for the worker of these arguments; without an answer, start it as Ray would."""
    context = next((argument for argument in sys.argv if argument.startswith(_CONTEXT)), _CONTEXT + "{}")
    wanted = json.loads(context.removeprefix(_CONTEXT) or "{}")
    environment = os.environ | (wanted.get("env_vars") or {})
    is_plain = (
        wanted.get("py_executable", sys.executable) == sys.executable
        and not wanted.get("command_prefix")
        and not wanted.get("override_worker_entrypoint")
        and "LD_PRELOAD" not in environment
        and os.pathsep.join(_list_sources(environment)) == os.environ[_SOURCES]
    )
    argv = [argument for argument in sys.argv[1:] if not argument.startswith(("--language=", _CONTEXT))]
    if is_plain and _request(environment, argv):
        return
    os.execv(sys.executable, [sys.executable, os.environ[_REAL_SETUP], *sys.argv[1:]])


def _request(environment: dict[str, str], argv: list[str]) -> bool:
    """Return whether the server has started a worker with this environment and these arguments."""
    body = json.dumps({"argv": argv, "env": environment, "cwd": os.getcwd()}).encode()
    streams = array.array("i", [1, 2]).tobytes()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(os.environ[_SOCKET])
            server.sendmsg(
                [len(body).to_bytes(4, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
            )
            server.sendall(body)
            return bool(server.recv(1))
    except OSError:
        return False


def _serve(path: str) -> None:
    """Answer requests by forks, until stdin is closed."""
    for name in _IMPORTED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    gc.freeze()  # otherwise each worker copies what it has imported, when its garbage is first collected
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(128)
        os.rename(f"{path}.new", path)
        while True:
            ready = select.select([listener, read_end, 0], [], [])[0]
            if 0 in ready and not os.read(0, 1):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))
                return
            if read_end in ready:
                os.read(read_end, 4096)
                _reap()
            if listener in ready:
                _fork(listener)


def _reap() -> None:
    """Forget the workers that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _fork(listener: socket.socket) -> None:
    """Start the worker of the next request."""
    connection = listener.accept()[0]
    size, streams, _, _ = socket.recv_fds(connection, 4, 2)
    with connection, connection.makefile("rb") as reader:
        request = json.loads(reader.read(int.from_bytes(size, "little")))
        if os.fork():
            for stream in streams:
                os.close(stream)
            connection.sendall(b"1")
            return
    code = 1
    try:
        listener.close()
        _become_worker(request, streams)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _become_worker(request, streams) -> None:
    """Run Ray's worker in this process, with the streams, environment and folder of who asked for it."""
    import random
    import runpy

    import numpy as np

    os.setpgid(0, 0)  # Ray ends the group of a worker that has died
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, number in zip(streams, (1, 2), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    # Only what differs is changed: Ray finds the memory of the process's title by the first variable.
    for name in set(os.environ) - set(request["env"]):
        del os.environ[name]
    for name, value in request["env"].items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:1] = [os.path.dirname(sys.argv[0]), *(folder for folder in folders if folder not in sys.path)]
    random.seed()
    np.random.seed()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _serve(sys.argv[1])
    else:
        _ask()
