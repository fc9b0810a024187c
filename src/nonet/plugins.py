"""Places to plug in: specs of one kind, found by name.

    ALGORITHMS = Registry("algorithm", Algorithm, "nonet.rl.algorithms")
    ALGORITHMS.get("grpo")                       # the shipped module nonet/rl/algorithms/grpo.py
    ALGORITHMS.get("mine.py:SPEC", files)        # a file beside the scenario
    ALGORITHMS.get("package.module:SPEC")        # anything that imports
    ALGORITHMS.get("theirs")                     # an entry point of the group nonet.algorithms

A shipped module holds its spec as `SPEC`. A spec is a data class of facts; what is heavy (torch, Ray) it names by a dotted
path, `package.module:Name`, which `heavy` imports where it is needed. Nothing else names one: a new one is a new file.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from nonet.errors import ConfigError
from nonet.suggest import suggestion

T = TypeVar("T")


@dataclass(frozen=True)
class Files:
    """Where `file.py` references are: in `folder`, and some of them as a run's copies, by the name they are cited with."""

    folder: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)

    def path(self, cited: str) -> Path:
        """The file that a reference cites."""
        return Path(self.folder) / self.copies.get(cited, cited)

    def address(self, use: Any) -> Any:
        """`use` with its file as an absolute path, for processes that work elsewhere; what names no file stays as it is."""
        where, colon, name = str(use).partition(":")
        return f"{self.path(where).resolve()}{colon}{name}" if where.endswith(".py") else use


HERE = Files()
OWN = "nonet_own_"  # what modules from files of the user's own are called


@dataclass(frozen=True)
class Registry(Generic[T]):
    """All specs of one kind.

    kind     as messages name it: "algorithm"
    spec     the class of a spec
    package  whose modules are the shipped ones; a module or subpackage counts when its name has no underscore before it
    module   where in it the spec is, "" for the module itself: "spec" for models/<name>/spec.py
    """

    kind: str
    spec: type[T]
    package: str
    module: str = ""

    @property
    def group(self) -> str:
        """The group of entry points that other packages name theirs in."""
        return f"nonet.{self.kind}s"

    def names(self) -> list[str]:
        """Shipped names and those of installed packages."""
        return sorted({*self.shipped(), *(point.name for point in entry_points(group=self.group))})

    def get(self, use: Any, files: Files = HERE) -> T:
        """The spec that `use` names. Raises ConfigError that says what there is."""
        if not isinstance(use, str):
            raise ConfigError(f"{self.kind}: wanted a name or a {self.spec.__name__}, got {use!r}")
        return self._checked(use, self._find(use, files))

    def _find(self, use: str, files: Files) -> Any:
        title = f"{self.kind} {use!r}"
        if is_reference(use):
            return find(use, files, title)
        if use in self.shipped():
            home = ".".join(filter(None, [self.package, use, self.module]))
            return importlib.import_module(home).SPEC
        for point in entry_points(group=self.group, name=use):
            return point.load()
        names = self.names()
        raise ConfigError(
            f"{title}{suggestion(use, names)} is neither shipped ({', '.join(names)}) "
            "nor file.py:Name nor package.module:Name"
        )

    def _checked(self, use: str, value: Any) -> T:
        if not isinstance(value, self.spec):
            raise ConfigError(f"{self.kind} {use!r} is {value!r}, which is no {self.spec.__name__}")
        return value

    def shipped(self) -> list[str]:
        """Names of the modules that come with Nonet."""
        return list(_shipped(self.package, self.module))


@cache
def _shipped(package: str, inner: str) -> tuple[str, ...]:
    """Modules of a package that hold a spec; with `inner`, subpackages that have a module of that name."""
    names = []
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if module.name.startswith("_") or module.name == "base":
            continue
        if not inner or (module.ispkg and importlib.util.find_spec(f"{package}.{module.name}.{inner}")):
            names.append(module.name)
    return tuple(names)


def is_reference(use: str) -> bool:
    """Whether `use` points outside Nonet: a file, a module, an actor, a server or a store."""
    return use.endswith(".py") or ":" in use


def heavy(path: str | Any) -> Any:
    """What a spec names by a dotted path, `package.module:Name`; the thing itself is given back as it is."""
    return find(path, HERE, path) if isinstance(path, str) else path


def find(use: str, files: Files, title: str) -> Any:
    """The object behind "file.py:Name" or "package.module:Name". Raises ConfigError."""
    where, _, attribute = use.partition(":")
    if not attribute:
        raise ConfigError(f"{title}: say which object of it: {where}:Name")
    module = import_file(files.path(where), title) if where.endswith(".py") else import_name(where, title)
    if not hasattr(module, attribute):
        raise ConfigError(f"{title}: there is no {attribute!r} in {where}")
    return getattr(module, attribute)


def file_of(use: Any) -> str | None:
    """The `file.py` of `file.py[:Name]`; None for anything else."""
    path = str(use).partition(":")[0]
    return path if path.endswith(".py") else None


def import_file(path: Path, title: str) -> ModuleType:
    """Import a file as a module, once for each content.

    Modules that lie beside the file can be imported by it, as by a script. Child processes that unpickle its functions can import
    it too, whichever way they are started.

    Raises:
        ConfigError: There is no such file, or it does not import; one line says why.
    """
    if not path.is_file():
        raise ConfigError(f"{title}: there is no file {path}. A file is looked up beside the scenario.")
    text = path.read_bytes()
    key = f"{OWN}{path.stem}_{hashlib.sha256(str(path.resolve()).encode() + text).hexdigest()[:12]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018  a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # dataclasses and pickle look a class's module up
    _forget_siblings_of_others(path.resolve().parent)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[key]
        raise _import_error(error, title) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    _beside.append(path.resolve().parent)
    if str(path.resolve().parent) not in sys.path:  # for what is imported later, behind everything that is installed
        sys.path.append(str(path.resolve().parent))
    _let_children_import(key, path.resolve())
    return module


_beside: list[Path] = []  # folders of files that were imported


def _forget_siblings_of_others(folder: Path) -> None:
    """Forget modules that were imported from beside other files, where this folder has one of the same name."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name.startswith(OWN) or "." in name or Path(file).parent not in _beside:
            continue
        if Path(file).parent != folder and ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
            del sys.modules[name]


_shims: dict[int, Path] = {}


def _let_children_import(key: str, path: Path) -> None:
    """Put a module of this name on the path that runs the file: children that are spawned know no other way to it."""
    if os.getpid() not in _shims:
        folder = Path(tempfile.mkdtemp(prefix="nonet-own-"))
        _shims[os.getpid()] = folder
        sys.path.append(str(folder))
        atexit.register(_remove_shims, os.getpid(), folder)
    run = "exec(compile(open(__file__, 'rb').read(), __file__, 'exec'))"
    lines = ["import sys", f"sys.path.append({str(path.parent)!r})", f"__file__ = {str(path)!r}", run]
    (_shims[os.getpid()] / f"{key}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _remove_shims(process: int, folder: Path) -> None:
    """Remove the folder when the process that made it ends, and not when a forked child does."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def import_name(module: str, title: str) -> ModuleType:
    """An installed module. Raises ConfigError in one line for what does not import."""
    try:
        return importlib.import_module(module)
    except BaseException as error:
        raise _import_error(error, title) from error


def _import_error(error: BaseException, title: str) -> BaseException:
    """A one-line ConfigError; what is not an error of the file (Ctrl-C) passes."""
    if not isinstance(error, (Exception, SystemExit)):
        return error
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(f"{title}: it does not import: {cause}")
