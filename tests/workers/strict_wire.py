"""A wire that refuses torch: installed in every process of a run, it raises when a payload's pickle names a torch object.

It reads the pickle's opcodes, so it sees what is nested at any depth: tensors, dtypes, sizes, modules. Large buffers travel
out of band and are not read. `NONET_WIRE` is a folder: a file a process, with what its Python is and how much it sent.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pickletools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def foreign_names(pickled: bytes) -> set[str]:
    """Names of torch's modules that a pickle would import."""
    return {name for name in imported(pickled) if name.partition(".")[0] in ("torch", "torch_npu")}


def imported(pickled: bytes) -> Iterator[str]:
    """Every "module.name" that a pickle looks up."""
    memo: dict[int, str] = {}
    texts: list[str] = []
    last = ""
    for code, value, _ in pickletools.genops(pickled):
        if code.name == "GLOBAL":
            yield str(value).replace(" ", ".")
        elif code.name == "STACK_GLOBAL":
            yield ".".join(texts[-2:])
        elif code.name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            last = str(value)
            texts.append(last)
        elif code.name in ("BINGET", "LONG_BINGET") and value in memo:
            texts.append(memo[value])
        if code.name == "MEMOIZE":
            memo[len(memo)] = last
        else:
            last = last if "UNICODE" in code.name else ""


class _Strict(types.ModuleType):
    """Ray's pickler, with a look at what it made."""

    def __init__(self, pickler: Any, seen: Path | None):
        super().__init__("strict_wire")
        self._pickler, self._seen = pickler, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pickler, name)

    def dumps(self, value: Any, **options: Any) -> bytes:
        pickled = self._pickler.dumps(value, **options)
        found = foreign_names(pickled)
        if self._seen:
            with self._seen.open("a") as out:
                out.write("torch\n" if found else "plain\n")
        if found:
            raise TypeError(
                f"a {type(value).__name__} on the wire holds torch objects: {', '.join(sorted(found))}"
            )
        return pickled


def install() -> None:
    """Make this process's wire strict."""
    from ray._private import serialization

    if isinstance(serialization.pickle, _Strict):
        return
    folder = os.environ.get("NONET_WIRE")
    seen = Path(folder) / f"{os.getpid()}.txt" if folder else None
    if seen:
        nonet = importlib.util.find_spec("nonet")
        facts = (sys.executable, importlib.metadata.version("torch"), nonet.origin if nonet else "")
        seen.write_text(" ".join(map(str, facts)) + "\n")
    serialization.pickle = _Strict(serialization.pickle, seen)
