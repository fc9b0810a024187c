"""A C++ compiler for tests that compiles the same sources once per machine: a copy of the core takes 17 s of computing.

    cached_compiler.install()                  # puts a folder with `c++` before the others in PATH
    python cached_compiler.py COMPILER ...     # what that `c++` does: compile, or copy what was compiled before

Tests have caches of their own (NONET_CACHE), in each of which Nonet compiles its core. A library is found again by the compiler,
the arguments and the bytes of all sources and headers, so a changed source is compiled.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

_UNUSED_S = 7 * 86_400.0


def install(folder: Path) -> None:
    """Make `c++` in `folder`, and put it before the machine's, if there is one."""
    compiler = shutil.which("c++")
    if compiler is None or "cached_compiler.py" in Path(compiler).read_bytes()[:1000].decode(
        errors="replace"
    ):
        return
    folder.mkdir(parents=True)
    (folder / "c++").write_text(
        f'#!/bin/sh\ncase " $* " in *" -shared "*) exec {sys.executable} -E -S {__file__} {compiler} "$@";; '
        f'*) exec {compiler} "$@";; esac\n'
    )
    (folder / "c++").chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def _compile(command: list[str]) -> int:
    """Run a command of a compiler whose output is `-o FILE`, or copy what it made before; return its exit code."""
    at = command.index("-o") + 1
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    made = Path(base).expanduser() / "nonet-tests" / "core" / f"{_compute_digest(command, at)}.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _remove_unused(made.parent)
            part = made.with_suffix(".part")
            if code := subprocess.call([*command[:at], str(part), *command[at + 1 :]]):
                return code
            part.replace(made)
    os.utime(made)
    shutil.copy(made, command[at])
    return 0


def _compute_digest(command: list[str], at: int) -> str:
    """Compute an identifier of a compiler, its arguments but the output's name, and the files that it reads."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    sources = [Path(word) for word in command[1:] if word.endswith((".c", ".cpp"))]
    words = [word for index, word in enumerate(command) if index != at and Path(word) not in sources]
    digest = hashlib.sha256(repr((words, version)).encode())
    for folder in sorted({source.parent for source in sources}):
        for path in sorted(folder.iterdir()):
            if path in sources or path.suffix == ".h":
                digest.update(repr((path.name, path.read_bytes())).encode())
    return digest.hexdigest()[:32]


def _remove_unused(folder: Path) -> None:
    """Remove libraries that no test has wanted for a week."""
    for path in folder.iterdir():
        if path.stat().st_mtime + _UNUSED_S < time.time():
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        code = _compile(sys.argv[1:])
    except OSError:  # such as a cache that cannot be written
        code = subprocess.call(sys.argv[1:])
    sys.exit(code)
