"""Registries of plug-ins: specs of one kind, found by name.

    ALGORITHMS = Registry("algorithm", Algorithm, "nonet.rl.algorithms")
    ALGORITHMS.get("grpo")                       # the shipped module nonet/rl/algorithms/grpo.py
    ALGORITHMS.get("mine.py:SPEC", files)        # a file beside the scenario
    ALGORITHMS.get("package.module:SPEC")        # any importable module
    ALGORITHMS.get("theirs")                     # an entry point of the group nonet.algorithms

A shipped module defines its spec as `SPEC`. A spec is a data class of plain values. It names objects that need
torch or Ray by a dotted path, `package.module:Name`, which `load_heavy` imports where they are needed. No other file
names a plug-in, so a new plug-in is one new file.
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
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from nonet.contracts import check_spec, find_entry_point, list_entry_points
from nonet.errors import ConfigError
from nonet.suggest import suggest_inline

T = TypeVar("T")


@dataclass(frozen=True)
class PluginFiles:
    """The location of the `file.py` files that a scenario refers to.

    Attributes:
        folder: The folder that relative paths start from.
        copies: The path of the run's own copy of a file, by the path that the scenario uses.
    """

    folder: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)

    def resolve_path(self, cited: str) -> Path:
        """Return the path of the file that a reference names."""
        return Path(self.folder) / self.copies.get(cited, cited)

    def make_absolute(self, use: Any) -> Any:
        """Make the file of a reference absolute, so that processes in another working directory can import it.

        Args:
            use: A reference such as `file.py:Name`, or anything else.

        Returns:
            The reference with an absolute path, or `use` unchanged if it does not name a file.
        """
        where, colon, name = str(use).partition(":")
        return f"{self.resolve_path(where).resolve()}{colon}{name}" if where.endswith(".py") else use


class LocatedName(str):
    """A name as a scenario says it, with the address by which every process finds the plug-in."""

    __slots__ = ("address",)
    address: str

    def __new__(cls, name: str, address: str) -> LocatedName:
        """Keep the address beside the name."""
        made = super().__new__(cls, name)
        made.address = address
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Take the address along to another process."""
        return LocatedName, (str(self), self.address)


HERE = PluginFiles()
OWN = "nonet_own_"  # prefix of the names of modules imported from files of the user


@dataclass(frozen=True)
class PluginRegistry(Generic[T]):
    """All specs of one kind.

    Attributes:
        kind: The name of the kind in messages, for example "algorithm".
        spec: The class of the specs.
        package: The package whose modules are the shipped specs. Modules whose name starts with an underscore do
            not count.
        module: The module that contains the spec, for specs that are subpackages: "spec" for models/<name>/spec.py.
            An empty string means that the spec is in the module itself.
        contract: What attributes of a spec must be, see `nonet.contracts.check_spec`; or a dotted path of it.
        page: The page of the documentation that shows how to write one.
    """

    kind: str
    spec: type[T]
    package: str
    module: str = ""
    contract: Mapping[str, Any] = field(default_factory=dict, hash=False)
    page: str = "docs/how-to/extend.md"

    @property
    def group(self) -> str:
        """The entry point group in which other packages register their specs."""
        return f"nonet.{self.kind}s"

    def list_names(self) -> list[str]:
        """Return the names of the shipped specs and of the specs of installed packages, sorted."""
        return sorted({*self.list_shipped(), *(point.name for point in list_entry_points(self.group))})

    def get(self, use: Any, files: PluginFiles = HERE) -> T:
        """Return the spec with this name or reference.

        Args:
            use: A name, `file.py:NAME` or `package.module:NAME`.
            files: The location of the files that references name.

        Raises:
            ConfigError: There is no such spec, the spec breaks the contract of its kind, or its name is taken.
        """
        if not isinstance(use, str):
            raise ConfigError(
                f"{self.kind}: expected a name or an object of type {self.spec.__name__}, got {use!r}"
            )
        title = f"{self.kind} {use!r}"
        if is_reference(use):
            value = load_reference(use, files, title)
            return self._check(value, f"{title} ({_locate_reference(use, files)})")
        shipped = self.list_shipped()
        point = find_entry_point(use, self.group, title, shipped)
        if point is not None:
            value = load_reference(point.value, HERE, title)
            return self._check(value, f"{title} ({_locate_reference(point.value, HERE)})")
        if use in shipped:
            home = ".".join(filter(None, [self.package, use, self.module]))
            return importlib.import_module(home).SPEC
        names = self.list_names()
        raise ConfigError(
            f"{title}{suggest_inline(use, names)} does not exist; choose one of: {', '.join(names)}, "
            "or refer to an object by file.py:Name or package.module:Name"
        )

    def _check(self, value: Any, title: str) -> T:
        """Return a plug-in's spec, or raise ConfigError if it breaks the contract of its kind."""
        contract = {name: load_heavy(declared) for name, declared in self.contract.items()}
        check_spec(value, self.spec, title, self.page, contract)
        return value

    def list_shipped(self) -> list[str]:
        """Return the names of the specs that are part of Nonet."""
        return list(_list_shipped(self.package, self.module))


@cache
def _list_shipped(package: str, inner: str) -> tuple[str, ...]:
    """List the modules of a package that define a spec; with `inner`, the subpackages that have a module of that name."""
    names = []
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if module.name.startswith("_") or module.name == "base":
            continue
        if not inner or (module.ispkg and importlib.util.find_spec(f"{package}.{module.name}.{inner}")):
            names.append(module.name)
    return tuple(names)


def _locate_reference(use: str, files: PluginFiles) -> str:
    """Return the file of an imported reference."""
    where = use.partition(":")[0]
    if where.endswith(".py"):
        return str(files.resolve_path(where))
    return getattr(sys.modules.get(where), "__file__", None) or where


def is_reference(use: str) -> bool:
    """Return whether `use` refers to something outside Nonet: a file, a module, an actor, a server or a store."""
    return use.endswith(".py") or ":" in use


def load_heavy(path: str | Any) -> Any:
    """Import the object that a spec names by a dotted path `package.module:Name`; return any other object unchanged."""
    return load_reference(path, HERE, path) if isinstance(path, str) else path


def load_reference(use: str, files: PluginFiles, title: str) -> Any:
    """Import the object behind "file.py:Name" or "package.module:Name".

    Args:
        use: The reference.
        files: The location of the files that references name.
        title: The start of error messages.

    Raises:
        ConfigError: The reference does not name an object, or the object cannot be imported.
    """
    where, _, attribute = use.partition(":")
    if not attribute:
        raise ConfigError(f"{title}: the reference does not name an object; write {where}:Name")
    module = (
        import_file(files.resolve_path(where), title) if where.endswith(".py") else import_name(where, title)
    )
    if not hasattr(module, attribute):
        raise ConfigError(f"{title}: there is no {attribute!r} in {where}")
    return getattr(module, attribute)


def parse_file(use: Any) -> str | None:
    """Return the `file.py` part of a reference `file.py[:Name]`, or None if the reference does not name a file."""
    path = str(use).partition(":")[0]
    return path if path.endswith(".py") else None


def import_file(path: Path, title: str) -> ModuleType:
    """Import a file as a module, once for each content.

    Modules in the same folder can be imported by the file, as if it were a script. Child processes that unpickle
    its functions can import it too, whichever start method they use.

    Args:
        path: The Python file.
        title: The start of error messages.

    Raises:
        ConfigError: The file does not exist or cannot be imported; the message is one line.
    """
    if not path.is_file():
        raise ConfigError(
            f"{title}: there is no file {path}. Relative paths start from the folder of the scenario."
        )
    text = path.read_bytes()
    key = f"{OWN}{path.stem}_{hashlib.sha256(str(path.resolve()).encode() + text).hexdigest()[:12]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018  a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # dataclasses and pickle look up the module of a class
    _forget_siblings_of_others(path.resolve().parent)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[key]
        raise _to_config_error(error, title) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    _beside.append(path.resolve().parent)
    if (
        str(path.resolve().parent) not in sys.path
    ):  # last on the path, so that installed packages take precedence
        sys.path.append(str(path.resolve().parent))
    _make_importable_by_children(key, path.resolve())
    return module


_beside: list[Path] = []  # folders that files were imported from


def _forget_siblings_of_others(folder: Path) -> None:
    """Remove modules imported from beside other files if this folder has a module of the same name."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name.startswith(OWN) or "." in name or Path(file).parent not in _beside:
            continue
        if Path(file).parent != folder and ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
            del sys.modules[name]


_shims: dict[int, Path] = {}


def _make_importable_by_children(key: str, path: Path) -> None:
    """Put a module of this name that runs the file on the path.

    Spawned child processes have no other way to import it.
    """
    if os.getpid() not in _shims:
        folder = Path(tempfile.mkdtemp(prefix="nonet-own-"))
        _shims[os.getpid()] = folder
        sys.path.append(str(folder))
        atexit.register(_remove_shims, os.getpid(), folder)
    run = "exec(compile(open(__file__, 'rb').read(), __file__, 'exec'))"
    lines = ["import sys", f"sys.path.append({str(path.parent)!r})", f"__file__ = {str(path)!r}", run]
    (_shims[os.getpid()] / f"{key}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _remove_shims(process: int, folder: Path) -> None:
    """Remove the folder when the process that created it ends, but not when a forked child ends."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def import_name(module: str, title: str) -> ModuleType:
    """Import an installed module.

    Args:
        module: The dotted name of the module.
        title: The start of error messages.

    Raises:
        ConfigError: The module cannot be imported; the message is one line.
    """
    try:
        return importlib.import_module(module)
    except BaseException as error:
        raise _to_config_error(error, title) from error


def _to_config_error(error: BaseException, title: str) -> BaseException:
    """Convert an import failure into a one-line ConfigError; return interrupts such as Ctrl-C unchanged."""
    if not isinstance(error, (Exception, SystemExit)):
        return error
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(f"{title}: the import failed: {cause}")
