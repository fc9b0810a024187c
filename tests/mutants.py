"""Change one line at a time and see that a test notices: mutants.yaml says which lines, and which tests must fail.

    python tests/mutants.py [--only NAME] [--folder rl] [--jobs 2]

Works on copies of the tree, one a job, and never in it. The named tests must pass there before anything is changed; a mutant
is killed when one of them then fails. A change that keeps tests from being collected says nothing: it is broken, and that is
an error as a survivor is. Processes are forked from one that has imported torch, which is half of a test's time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "mutants.yaml"
_LEFT_OUT = shutil.ignore_patterns(
    ".git",
    ".venv",
    "runs",
    "build",
    "*.egg-info",
    ".ruff_cache",
    ".pytest_cache",
    "__pycache__",
)
_LIMIT_S = 1800  # a busy machine is no mutant that hangs
_SLOWEST_TEST_S = 600
_WORDS = {0: "survived", 1: "killed"}


@dataclass(frozen=True)
class Mutant:
    """A change of one place of a file, why it matters, and the tests (node ids) of which one must fail."""

    name: str
    file: str
    before: str
    after: str
    why: str
    tests: tuple[str, ...]

    def changed(self, text: str) -> str:
        """Return the file's text with the change. Raises ValueError where `before` is not there exactly once."""
        count = text.count(self.before)
        if count != 1:
            raise ValueError(f"{self.name}: `before` is {count} times in {self.file}, not once")
        return text.replace(self.before, self.after)


def read_mutants(file: Path = FILE) -> list[Mutant]:
    """Read the mutants of a file, in its order."""
    from ruamel.yaml import YAML

    entries = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def _tested(folder: str, tests: Sequence[str], log: str) -> None:
    """In a process of its own: run tests in a copy of the tree and end with pytest's code."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = f"{folder}/src"
    sys.path.insert(0, f"{folder}/src")
    sys.argv = ["pytest"]
    import pytest

    code = pytest.main(["-x", "-q", "-m", "not slow", f"--timeout={_SLOWEST_TEST_S}", *tests])
    package = sys.modules.get("nonet")
    if package is not None and not str(package.__file__).startswith(folder):
        print(f"the tests ran {package.__file__}, which is not the copy's")
        code = 3
    sys.stdout.flush()
    os._exit(int(code))


class Bench:
    """Copies of the tree, and processes that test in them."""

    def __init__(self, jobs: int, root: Path):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "numpy", "pyarrow", "pydantic", "pytest"])
        self._folders = [root / f"copy-{number}" for number in range(jobs)]
        for folder in self._folders:
            shutil.copytree(ROOT, folder, symlinks=True, ignore=_LEFT_OUT)

    def run(self, tests: Iterable[str], folder: Path) -> tuple[int, str]:
        """Run tests in a copy; return pytest's exit code (-1: timeout, -2: died) and what was printed."""
        log = folder.with_suffix(".log")
        process = self._context.Process(target=_tested, args=(str(folder), tuple(tests), str(log)))
        process.start()
        process.join(_LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
            return -1, log.read_text(errors="replace")
        code = process.exitcode
        return (code if code is not None and code >= 0 else -2), log.read_text(errors="replace")

    def each(self, work: Sequence, do) -> None:
        """`do(item, folder)` for all items, each folder by one thread."""
        waiting: queue.SimpleQueue = queue.SimpleQueue()
        for item in work:
            waiting.put(item)

        def drain(folder: Path) -> None:
            while True:
                try:
                    item = waiting.get_nowait()
                except queue.Empty:
                    return
                do(item, folder)

        threads = [threading.Thread(target=drain, args=(folder,)) for folder in self._folders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _write(path: Path, text: str) -> None:
    """Write a source file and drop its bytecode, which Python tells apart only by size and whole seconds."""
    path.write_text(text, encoding="utf-8")
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()


def _unmutated(bench: Bench, mutants: Sequence[Mutant]) -> list[str]:
    """Return what is wrong with the unchanged tests: all that a mutant names must pass, one file at a time."""
    wrong: list[str] = []
    by_file: dict[str, dict[str, None]] = {}
    for test in (test for mutant in mutants for test in mutant.tests):
        by_file.setdefault(test.split("::")[0], {})[test] = None

    def check(tests: Iterable[str], folder: Path) -> None:
        code, text = bench.run(tests, folder)
        if code:
            wrong.append(f"code {code} without any change: {' '.join(tests)}\n{text[-3000:]}")

    bench.each(list(by_file.values()), check)
    return wrong


def _verdicts(bench: Bench, mutants: Sequence[Mutant]) -> dict[str, str]:
    found: dict[str, str] = {}

    def attempt(mutant: Mutant, folder: Path) -> None:
        path, began = folder / mutant.file, time.monotonic()
        text = path.read_text(encoding="utf-8")
        _write(path, mutant.changed(text))
        try:
            code, printed = bench.run(mutant.tests, folder)
        finally:
            _write(path, text)
        verdict = {-1: "killed (hung)", -2: "killed (died)"}.get(code, _WORDS.get(code, "broken"))
        found[mutant.name] = verdict
        print(f"{verdict:<14}{time.monotonic() - began:6.1f} s  {mutant.name}  ({mutant.file})", flush=True)
        if not verdict.startswith("killed"):
            print(f"    {mutant.before!r} -> {mutant.after!r}\n    {mutant.why}", flush=True)
        if verdict == "broken":
            print(printed[-3000:], flush=True)

    bench.each(mutants, attempt)
    return found


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--only", action="append", help="the mutants whose name holds this; may be given again"
    )
    options.add_argument("--folder", help="mutants of this folder alone")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options.add_argument("--file", type=Path, default=FILE)
    given = options.parse_args()
    mutants = [
        mutant
        for mutant in read_mutants(given.file)
        if (not given.only or any(part in mutant.name for part in given.only))
        and (not given.folder or mutant.file.startswith(f"{given.folder.rstrip('/')}/"))
    ]
    if not mutants:
        print("no mutant is called so", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nonet-mutants-") as root:
        bench = Bench(max(1, min(given.jobs, len(mutants))), Path(root))
        wrong = _unmutated(bench, mutants)
        if wrong:
            print("\n\n".join(wrong), file=sys.stderr)
            return 2
        print(f"all tests named pass as the tree is, in {time.monotonic() - began:.0f} s", flush=True)
        found = _verdicts(bench, mutants)
    alive = [name for name, verdict in found.items() if not verdict.startswith("killed")]
    print(f"{len(found) - len(alive)} of {len(found)} killed in {time.monotonic() - began:.0f} s")
    for name in alive:
        print(f"{found[name]}: {name}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
