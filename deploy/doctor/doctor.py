"""`nonet doctor`: check versions, devices, Ray, compiler, memory and folders, with advice for each problem.

The state of a check is ok, a warning (runs work with restrictions) or a failure (runs do not work). The
checks take seconds and start no processes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from nonet.controller.cluster import get_host_memory_bytes
from nonet.controller.plan import format_bytes
from nonet.embedding.tables import get_cache_folder
from nonet.errors import ConfigError

OK, WARNING, FAILURE = "ok", "warning", "failure"
# Optional packages, and what needs them.
_OPTIONAL = {"triton": "attention kernels (interpreter on cpu)", "transformers": "Hugging Face backbones"}
_COMPILERS = ("c++", "g++", "clang++")
_SERVE_PORT = 8000  # the default of `nonet serve`
# Smaller values give a warning: the limit of open files, shared memory (for Ray's object store), and memory.
_MIN_OPEN_FILES, _MIN_SHM_BYTES, _MIN_MEMORY_BYTES = 4096, 200 << 20, 2 << 30


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """The result of one check.

    Attributes:
        name: The name of what was checked.
        state: OK, WARNING or FAILURE.
        found: What was found, such as a version or a size.
        advice: How to mend a warning or a failure, or its effect; "" if there is nothing to do.
    """

    name: str
    state: str
    found: str
    advice: str = ""


def examine() -> list[MachineCheck]:
    """Run every check and return the results in the order in which they are shown."""
    return [
        *_check_versions(),
        *_check_devices(),
        _check_ray(),
        _check_port(),
        _check_compiler(),
        *_check_memory(),
        *_check_folders(),
    ]


def main(as_json: bool) -> int:
    """Print the checks and return the exit code: 1 if a check failed, else 0."""
    checks = examine()
    print(json.dumps([asdict(check) for check in checks], indent=1) if as_json else format_checks(checks))
    return 1 if any(check.state == FAILURE for check in checks) else 0


def format_checks(checks: list[MachineCheck]) -> str:
    """Format the checks as lines, with a summary at the end."""
    marks = {OK: "ok     ", WARNING: "warning", FAILURE: "FAILURE"}
    width = max(len(check.name) for check in checks)
    lines = [
        f"{marks[check.state]}  {check.name.ljust(width)}  {check.found}"
        + (f": {check.advice}" if check.advice else "")
        for check in checks
    ]
    failures, warnings = (sum(check.state == state for check in checks) for state in (FAILURE, WARNING))
    verdict = f"not ready: {failures} failure{'s' if failures > 1 else ''}" if failures else "ready"
    verdict += f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    return "\n".join([*lines, "", verdict])


def _check_versions() -> Iterator[MachineCheck]:
    """Check the versions of Python and of all required and optional packages."""
    python = platform.python_version_tuple()[:2]
    is_supported = ("3", "11") <= python < ("3", "13")
    yield MachineCheck(
        "python",
        OK if is_supported else FAILURE,
        platform.python_version(),
        "" if is_supported else "3.11 or 3.12 is needed",
    )
    for requirement in requires("nonet") or ():  # such as "ray[default]>=2.9,<3; python_version < '3.13'"
        if "extra ==" in requirement:
            continue
        name, bounds = re.fullmatch(
            r"([A-Za-z0-9_.\-]+)(?:\[[^\]]*\])?\s*(.*)", requirement.split(";")[0].strip()
        ).groups()  # type: ignore[union-attr]
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield MachineCheck(name, FAILURE, "not installed", f"pip install '{name}{bounds}'")
            continue
        fits = _is_within_bounds(installed, bounds)
        yield MachineCheck(name, OK if fits else FAILURE, installed, "" if fits else f"{bounds} is needed")
    for name, use in _OPTIONAL.items():
        try:
            yield MachineCheck(name, OK, version(name))
        except PackageNotFoundError:
            yield MachineCheck(name, WARNING, "not installed", f"needed only for {use}")


def _is_within_bounds(installed: str, bounds: str) -> bool:
    """Return whether a version is within bounds such as `>=a,<b`."""

    def parse_version(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text.split("+")[0])][:3]

    for bound in filter(None, bounds.split(",")):
        is_too_old = bound.startswith(">=") and parse_version(installed) < parse_version(bound)
        is_too_new = bound.startswith("<") and parse_version(installed) >= parse_version(bound)
        if is_too_old or is_too_new:
            return False
    return True


def _check_devices() -> Iterator[MachineCheck]:
    """Report the CPU cores and accelerators; they are never a problem."""
    import torch

    cores = len(os.sched_getaffinity(0))
    yield MachineCheck("cores", OK, f"{cores}, {platform.machine()}, torch {torch.__version__}")
    device_count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if device_count:
        device = torch.accelerator.current_accelerator()
        yield MachineCheck("devices", OK, f"{device_count} x {device.type if device else 'unknown'}")
    else:
        yield MachineCheck("devices", OK, "none other than cpu")


def _check_ray() -> MachineCheck:
    """Check the environment variables of Ray."""
    from nonet.workers import check_ray_environment

    try:
        check_ray_environment()
    except ConfigError as error:
        return MachineCheck("ray", FAILURE, str(error))
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return MachineCheck("ray", OK, "no RAY_ADDRESS: each run starts a local Ray that ends with it")
    return MachineCheck("ray", OK, f"RAY_ADDRESS is {address}")


def _check_port() -> MachineCheck:
    """Check that the default port of `nonet serve` is free."""
    from nonet.workers import check_port

    try:
        check_port("127.0.0.1", _SERVE_PORT)
    except ConfigError as error:
        return MachineCheck("port", WARNING, str(error), "`nonet serve` listens there by default")
    return MachineCheck("port", OK, f"{_SERVE_PORT} is free for nonet serve")


def _check_compiler() -> MachineCheck:
    """Check that there is a C++ compiler, which builds the native core of sparse tables."""
    path = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if path:
        return MachineCheck("compiler", OK, path)
    return MachineCheck(
        "compiler",
        WARNING,
        f"none of {', '.join(_COMPILERS)} found",
        "sparse tables use NumPy, which is several times slower",
    )


def _check_memory() -> Iterator[MachineCheck]:
    """Check memory, shared memory and the limit of open files."""
    memory_bytes = get_host_memory_bytes()
    is_small = memory_bytes < _MIN_MEMORY_BYTES
    yield MachineCheck(
        "memory",
        WARNING if is_small else OK,
        format_bytes(memory_bytes),
        "runs may need more than 2 GB" if is_small else "",
    )
    try:
        free_bytes = shutil.disk_usage("/dev/shm").free
        is_small = free_bytes < _MIN_SHM_BYTES
        advice = "Ray's object store falls back to disk; start the container with --shm-size=1g"
        yield MachineCheck(
            "/dev/shm",
            WARNING if is_small else OK,
            f"{format_bytes(free_bytes)} free",
            advice if is_small else "",
        )
    except OSError:
        yield MachineCheck("/dev/shm", WARNING, "does not exist", "Ray's object store falls back to disk")
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_small = soft_limit < _MIN_OPEN_FILES and soft_limit != resource.RLIM_INFINITY
    yield MachineCheck(
        "open files",
        WARNING if is_small else OK,
        f"{soft_limit}",
        f"ulimit -n {_MIN_OPEN_FILES}" if is_small else "",
    )


def _check_folders() -> Iterator[MachineCheck]:
    """Check that the folders of runs, caches and temporary files are writable."""
    runs = Path(os.environ.get("NONET_RUNS", "runs")).absolute()
    for name, folder, variable in (
        ("runs", runs, "NONET_RUNS"),
        ("cache", get_cache_folder(), "XDG_CACHE_HOME"),
        ("temporary", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if os.access(existing, os.W_OK | os.X_OK):
            free_bytes = shutil.disk_usage(existing).free
            yield MachineCheck(f"{name} folder", OK, f"{folder}, {format_bytes(free_bytes)} free")
        else:
            yield MachineCheck(f"{name} folder", FAILURE, f"{folder} cannot be written", f"set {variable}")
