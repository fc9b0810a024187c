"""Find, check and, if necessary, compile the shared library of the C++ core, once per node.

A library that was built with the package is used if it fits this machine's architecture, has this ABI, exports
every function that its sources declare and is not older than them. Otherwise the sources are compiled into the
user's cache (about 3 s) under a lock, so that one of the workers on a node compiles and the others wait. The
library links nothing but the C library, so that a new version of torch or Python does not require a new build.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import weakref
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nonet.atomic import replace_file
from nonet.errors import NonetError

ABI = 9  # The version of the core's functions and structures; it must equal that of the sources (nonet_abi).
_EMBEDDING_FOLDER = Path(__file__).resolve().parents[1]
_FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden",
)  # fmt: skip
_COMPILE_TIMEOUT_S = 300
# Matches the name of a function that a source file exports.
_EXPORTED = re.compile(r"^NONET_API[^({;]*?\b(nonet_\w+)\(", re.MULTILINE)
_SLACK_S = (
    60  # Unpacking a wheel gives its files times that differ by seconds, so a source may be this much newer.
)
# The index of each counter in the core's array.
_COUNTER_INDICES = {
    "rows": 0,
    "evicted": 1,
    "refused": 2,
    "dropped": 3,
    "waiting": 4,
    "bytes": 5,
    "absent": 6,
}


class NativeUnavailable(NonetError):
    """There is no usable native library and none can be built; the message gives the reason."""


class PolicyStruct(ctypes.Structure):
    """The ctypes layout of `nonet::Policy`."""

    _fields_ = [
        ("evict", c_int32),
        ("admit_count", c_int32),
        ("admit_threshold", c_int64),
        ("ttl_steps", c_int64),
        ("budget_rows", c_int64),
        ("group_bits", c_int32),
    ]


class ConfigStruct(ctypes.Structure):
    """The ctypes layout of `nonet::Config`."""

    _fields_ = [
        ("width", c_int64),
        ("state_width", c_int64),
        ("format", c_int32),
        ("rule", c_int32),
        ("base", c_uint64),
        *((name, c_float) for name in ("scale", "fill", "eps", "clip", "l1", "l2")),
        ("weight_decay", c_double),
        ("policy", PolicyStruct),
        ("counters", POINTER(c_int64)),
    ]


def register_finalizer(owner: object, *call: Any) -> weakref.finalize[..., Any]:
    """Call `call[0](*call[1:])` when `owner` is garbage-collected.

    The call is not made at interpreter exit, because a daemon thread may still be in the core then.
    """
    finalizer = weakref.finalize(owner, *call)
    finalizer.atexit = False
    return finalizer


class CoreCounters:
    """The counters of a native table, which the core updates in place.

    `counters[name]` returns one; the names are rows, evicted (whose keys the table has not taken yet), refused, dropped,
    waiting, bytes and absent.
    """

    def __init__(self) -> None:
        self.words = (c_int64 * len(_COUNTER_INDICES))()

    def __getitem__(self, name: str) -> int:
        return self.words[_COUNTER_INDICES[name]]


@cache
def load_library() -> ctypes.CDLL:
    """Load the native core, after compiling it if no installed or cached library can be used.

    Raises:
        NativeUnavailable: If there is no usable library, with the reason.
    """
    if os.environ.get("NONET_CORE") == "numpy":
        raise NativeUnavailable("NONET_CORE=numpy selects the NumPy tables")
    reasons = []
    for path in list_packaged():
        core, reason = _open_library(path)
        if core:
            return core
        reasons.append(f"{path.name}: {reason}")
    core, reason = _open_library(_get_or_compile(reasons), fresh=True)
    if core is None:
        raise NativeUnavailable(f"the library that was compiled on this node cannot be used: {reason}")
    return core


def list_packaged() -> list[Path]:
    """List the libraries that were installed with the package."""
    return sorted(_EMBEDDING_FOLDER.glob("_core*.so"))


def find_compiler() -> str | None:
    """Find the C++ compiler to build with: $CXX, else the first of c++, g++ and clang++ on the path."""
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in compilers if (path := shutil.which(name))), None)


def get_cache_folder() -> Path:
    """Return Nonet's cache on this node: below $NONET_CACHE, else below the user's cache."""
    base = os.environ.get("NONET_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return Path(base or os.path.expanduser("~/.cache")) / "nonet"


def list_sources() -> list[Path]:
    """List the source files of the core in a fixed order."""
    return sorted(path for path in (_EMBEDDING_FOLDER / "native").iterdir() if path.suffix in (".h", ".cpp"))


def list_declared() -> list[str]:
    """List the names of the functions that the sources export, sorted."""
    source_texts = [path.read_text() for path in list_sources() if path.suffix == ".cpp"]
    return sorted({name for text in source_texts for name in _EXPORTED.findall(text)})


def make_compile_command(cxx: str, out: Path, *extra_flags: str) -> list[str]:
    """Build the command line that compiles the core into the shared library `out`."""
    source_paths = [str(path) for path in list_sources() if path.suffix == ".cpp"]
    return [cxx, *_FLAGS, *_get_python_include(), *extra_flags, "-shared", *source_paths, "-o", str(out)]


def install_fast_methods(table: type, lookup: str, push: str) -> None:
    """Give a table class native methods for plain keys, which bypass Python and ctypes.

    Plain keys are int64 [N], contiguous and in host memory, as a torch.Tensor or an ndarray. Other keys are passed
    to the methods named by `lookup` and `push`. Nothing happens if the library or torch lacks what the native
    methods need.

    Args:
        table: The class that gets the methods.
        lookup: The name of its general lookup method.
        push: The name of its general push method.
    """
    bind = ctypes.PYFUNCTYPE(c_void_p, c_int32, *[ctypes.py_object] * 4)(
        ("nonet_python_method", load_library())
    )
    for number, general in enumerate((lookup, push)):
        if address := bind(number, table, general, Tensor, np.ndarray):
            method = ctypes.cast(address, ctypes.py_object).value
            setattr(table, method.__name__, method)


def _get_python_include() -> list[str]:
    folder = sysconfig.get_path("include")
    return [f"-I{folder}"] if Path(folder, "Python.h").exists() else []


def _open_library(path: Path, fresh: bool = False) -> tuple[ctypes.CDLL | None, str]:
    """Load the library at `path` and check it; return it, or None and the reason why it cannot be used.

    `fresh` says that it was compiled from these sources, so that its time need not be compared with theirs.
    """
    if not fresh and path.stat().st_mtime + _SLACK_S < max(
        source.stat().st_mtime for source in list_sources()
    ):
        return None, "older than its sources"
    try:
        opened = ctypes.CDLL(str(path))
    except OSError as error:  # Another architecture, another libc or a truncated file.
        return None, str(error)
    try:
        abi, config_bytes = opened.nonet_abi(), opened.nonet_config_bytes()
    except AttributeError:
        return None, "not a library of Nonet's core"
    if (abi, config_bytes) != (ABI, ctypes.sizeof(ConfigStruct)):
        return None, f"has ABI {abi}, this version needs {ABI}"
    if missing := [name for name in list_declared() if not hasattr(opened, name)]:
        return None, f"has no {', '.join(missing)}"
    return _bind_signatures(opened), ""


def _get_or_compile(reasons: list[str]) -> Path:
    """Return the path of this machine's library in the cache, after compiling it if it is missing.

    `reasons` say why the installed libraries cannot be used; they are part of the error if there is no compiler.
    """
    cxx = find_compiler()
    if cxx is None:
        reasons_text = "; ".join(reasons) or "no library came with the package"
        raise NativeUnavailable(
            f"{reasons_text}; and there is no C++ compiler: install g++ or clang++, or set CXX"
        )
    folder = get_cache_folder() / "core"
    out = folder / f"core-{platform.machine()}-{_compute_digest(cxx)}.so"
    if out.exists():
        return out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{out.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():
                _compile_library(cxx, out)
    except OSError as error:
        raise NativeUnavailable(
            f"cannot write {folder}: {error}; set NONET_CACHE to a writable folder"
        ) from error
    return out


def _compile_library(cxx: str, out: Path) -> None:
    """Compile the core and move the library to `out` atomically."""
    with replace_file(out) as temporary_path:
        try:
            subprocess.run(
                make_compile_command(cxx, temporary_path),
                check=True,
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            first_line = str(error.stderr or error).strip().splitlines()[:1]
            raise NativeUnavailable(f"{cxx} could not compile the core: {' '.join(first_line)}") from error


def _compute_digest(cxx: str) -> str:
    """Compute an identifier of these sources, this compiler and these flags."""
    digest = hashlib.sha256(f"{cxx} {_FLAGS} {platform.libc_ver()} {_get_python_include() != []}".encode())
    version = subprocess.run([cxx, "--version"], capture_output=True, check=False, timeout=30).stdout
    digest.update(version)
    for path in list_sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _bind_signatures(opened: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the result and argument types of the core's functions, in this order, and return the library."""
    pointer, i64 = c_void_p, c_int64
    signatures = {
        "isa": (c_char_p, c_char_p),
        "table_new": (pointer, POINTER(ConfigStruct), c_char_p),
        "table_free": (None, pointer),
        "table_clear": (c_int32, pointer),
        # Functions called in each step declare 64-bit numbers as pointers too, which saves ctypes 0.1 us each.
        "table_look": (i64, pointer, pointer, pointer, pointer),
        "table_lookup": (i64, pointer, pointer, pointer, pointer, pointer),
        "table_apply": (i64, pointer, pointer, pointer, pointer, pointer, pointer, c_double),
        "table_find": (i64, pointer, pointer, i64, pointer),
        "table_upsert": (i64, pointer, pointer, i64, *[pointer] * 5),
        "table_take": (i64, pointer, pointer, i64, pointer, i64),
        "table_enter": (i64, pointer, pointer, i64, pointer),
        "table_forget": (i64, pointer, pointer, i64),
        "table_choose": (i64, pointer, c_uint64, c_uint64, i64, POINTER(pointer)),
        "table_read": (None, pointer, pointer, i64, *[pointer] * 5),
        "chosen_free": (None, pointer),
        "table_score": (i64, pointer, pointer, pointer, i64),
        "table_take_evicted": (None, pointer, pointer),
        "table_waiting": (i64, pointer, pointer, pointer),
        "table_wait": (i64, pointer, pointer, pointer, i64),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(opened, f"nonet_{name}")
        function.restype, function.argtypes = result, arguments
    return opened
