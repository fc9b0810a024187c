"""Registries of plug-ins, each of which finds the specs of one kind by name.

    ALGORITHMS = PluginRegistry("algorithm", Algorithm, "nonet.rl.algorithms")
    ALGORITHMS.get("grpo")                       # the shipped module nonet/rl/algorithms/grpo.py
    ALGORITHMS.get("mine.py:SPEC", files)        # a file beside the scenario
    ALGORITHMS.get("package.module:SPEC")        # any importable module
    ALGORITHMS.get("theirs")                     # an entry point of the group nonet.algorithms

A plug-in is described by its spec, a data class of plain values; a shipped module defines its spec as `SPEC`. A scenario
names a plug-in by its name or by a reference, `file.py:Name` or `package.module:Name`. A spec names objects that need torch
or Ray by such a dotted path, which `load_heavy` imports where they are needed. No other file names a plug-in, so a new
plug-in is one new file.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from nonet.contracts import check_spec, find_entry_point, list_entry_points
from nonet.errors import ConfigError
from nonet.run_code import is_code_reference
from nonet.suggest import suggest_inline
from nonet.trust import ContentLoader, check_reference, list_trust, read_code

T = TypeVar("T")


@dataclass(frozen=True)
class PluginFiles:
    """The location of the `file.py` files that a scenario refers to, the user's own files.

    Attributes:
        folder: The folder that relative paths start from.
        copies: For the files of a run, the path of the run's copy of a file, by the path that the scenario uses.
        is_closed: Whether all files are in the folder, as those of a run are.
    """

    folder: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    is_closed: bool = False

    @classmethod
    def of_run(cls, run: Path, records: Sequence[Mapping[str, Any]]) -> PluginFiles:
        """Return the location of the copies of the user's own files that a run has.

        Args:
            run: The folder of the run.
            records: What `nonet.run_code.read_copy_records` returned.
        """
        copies = {record["use"]: record["copy"] for record in records if record["use"]}
        return cls(str(run / "sources"), copies, is_closed=True)

    def resolve_path(self, cited: str) -> Path:
        """Return the path of the file that a scenario names as `cited`, or of its copy if there is one.

        Raises:
            ConfigError: The folder is closed, and the file is outside of it.
        """
        path = Path(self.folder) / self.copies.get(cited, cited)
        if self.is_closed and not path.resolve().is_relative_to(Path(self.folder).resolve()):
            raise ConfigError(
                f"use: {cited} leads out of {self.folder}; a run has copies of all its files there, so start a new run"
            )
        return path

    def make_absolute(self, use: Any) -> Any:
        """Return a reference with an absolute path, so that processes in another working directory can import it.

        Args:
            use: A reference such as `file.py:Name`, or anything else.

        Returns:
            The reference with an absolute path, or `use` unchanged if it does not name a file.
        """
        file, colon, name = str(use).partition(":")
        return f"{self.resolve_path(file).resolve()}{colon}{name}" if file.endswith(".py") else use


class LocatedName(str):
    """A name as a scenario gives it, with the reference by which every process finds the plug-in.

    Attributes:
        address: The reference, with an absolute path.
    """

    __slots__ = ("address",)
    address: str

    def __new__(cls, name: str, address: str) -> LocatedName:
        """Create a name with its address."""
        located_name = super().__new__(cls, name)
        located_name.address = address
        return located_name

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name together with its address."""
        return LocatedName, (str(self), self.address)


HERE = PluginFiles()  # files relative to the working directory
OWN = "nonet_own_"  # prefix of the names of modules imported from files of the user


@dataclass(frozen=True)
class PluginRegistry(Generic[T]):
    """The registry of all specs of one kind.

    Attributes:
        kind: The name of the kind in messages, for example "algorithm".
        spec: The class of the specs.
        package: The package whose modules are the shipped plug-ins, except `base` and modules whose name starts with an
            underscore.
        module: For shipped plug-ins that are subpackages, the module in each that contains the spec: "spec" for
            models/<name>/spec.py. Empty if the plug-ins are single modules.
        contract: By attribute of the spec, what its value must implement (see `nonet.contracts.check_spec`), or the dotted
            path of that.
        page: The page of the documentation that shows how to write a spec.
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
            ConfigError: There is no such spec, the spec breaks the contract of its kind, or two plug-ins have its name.
        """
        if not isinstance(use, str):
            raise ConfigError(
                f"{self.kind}: expected a name or an object of type {self.spec.__name__}, got {use!r}"
            )
        title = f"{self.kind} {use!r}"
        if is_code_reference(use):
            value = load_reference(use, files, title)
            return self._check(value, f"{title} ({_locate_reference(use, files)})")
        shipped = self.list_shipped()
        point = find_entry_point(use, self.group, title, shipped)
        if point is not None:
            value = load_reference(point.value, HERE, title)
            return self._check(value, f"{title} ({_locate_reference(point.value, HERE)})")
        if use in shipped:
            module_name = ".".join(filter(None, [self.package, use, self.module]))
            return importlib.import_module(module_name).SPEC
        names = self.list_names()
        raise ConfigError(
            f"{title}{suggest_inline(use, names)} does not exist; choose one of: {', '.join(names)}, "
            "or refer to an object by file.py:Name or package.module:Name"
        )

    def _check(self, value: Any, title: str) -> T:
        """Return `value` as a spec, or raise ConfigError if it is no spec or breaks the contract of its kind."""
        contract = {name: load_heavy(declared) for name, declared in self.contract.items()}
        check_spec(value, self.spec, title, self.page, contract)
        return value

    def list_shipped(self) -> list[str]:
        """Return the names of the specs that are part of Nonet, sorted."""
        return list(_list_shipped(self.package, self.module))


@cache
def _list_shipped(package: str, inner: str) -> tuple[str, ...]:
    """Return the names of the plug-ins in a package.

    Args:
        package: The package.
        inner: If empty, every module that is no package is a plug-in; otherwise, every subpackage with a module of this name.
    """
    names = []
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if module.name.startswith("_") or module.name == "base":
            continue
        is_plugin = not inner
        if module.ispkg:
            is_plugin = bool(inner and importlib.util.find_spec(f"{package}.{module.name}.{inner}"))
        if is_plugin:
            names.append(module.name)
    return tuple(names)


def _locate_reference(use: str, files: PluginFiles) -> str:
    """Return the file of an imported reference, or its module if the module has no file."""
    file_or_module = use.partition(":")[0]
    if file_or_module.endswith(".py"):
        return str(files.resolve_path(file_or_module))
    return getattr(sys.modules.get(file_or_module), "__file__", None) or file_or_module


def load_heavy(path: str | Any) -> Any:
    """Import the object that a spec names by a dotted path `package.module:Name`; return any other object unchanged."""
    return load_reference(path, HERE, path) if isinstance(path, str) else path


def load_reference(use: str, files: PluginFiles, title: str) -> Any:
    """Import the object that "file.py:Name" or "package.module:Name" refers to, and return it.

    Args:
        use: The reference.
        files: The location of the files that references name.
        title: The start of error messages.

    Raises:
        ConfigError: The reference does not name an object, or the object cannot be imported.
    """
    file_or_module, _, attribute = use.partition(":")
    if not attribute:
        raise ConfigError(f"{title}: the reference does not name an object; write {file_or_module}:Name")
    is_file = file_or_module.endswith(".py")
    if is_file:
        file = files.resolve_path(file_or_module)
        check_reference(use, title, file)
        module = import_file(file, title)
    else:
        module = import_name(file_or_module, title, use)
    if not hasattr(module, attribute):
        raise ConfigError(f"{title}: there is no {attribute!r} in {file_or_module}")
    return getattr(module, attribute)


def parse_file(use: Any) -> str | None:
    """Return the path of the file in a reference `file.py[:Name]`, or None if the reference does not name a file."""
    path = str(use).partition(":")[0]
    return path if path.endswith(".py") else None


def import_file(path: Path, title: str) -> ModuleType:
    """Import a file as a module; a file whose content has changed is imported as another module.

    The file can import modules in its folder, as if it were a script. Child processes that unpickle its functions can
    import it too, whichever start method they use.

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
    path = path.absolute()
    resolved = path.resolve()
    content = read_code(path, title)
    digest = hashlib.sha256(str(resolved).encode() + content).hexdigest()
    module_name = f"{OWN}{path.stem}_{digest[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    loader = ContentLoader(module_name, str(path), content)
    module_spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert module_spec is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and pickle look up the module of a class
    folder = resolved.parent
    _remove_modules_of_other_folders(folder)
    sys.path.insert(0, str(folder))
    try:
        loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        raise _to_config_error(error, title) from error
    finally:
        sys.path.remove(str(folder))
    _imported_folders.append(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # the last entry, so that installed packages take precedence
    _make_importable_by_children(module_name, resolved, content)
    return module


_imported_folders: list[Path] = []  # folders that files of the user were imported from


def _remove_modules_of_other_folders(folder: Path) -> None:
    """Remove modules from `sys.modules` that were imported from beside other files, if `folder` has a module of their name."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or name.startswith(OWN) or "." in name or Path(file).parent not in _imported_folders:
            continue
        if Path(file).parent != folder and ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
            del sys.modules[name]


_shim_folders: dict[int, Path] = {}  # the folder of modules that run files of the user, by process


def _make_importable_by_children(module_name: str, path: Path, content: bytes) -> None:
    """Write a module of this name that runs a file into a folder on `sys.path`, which spawned child processes inherit.

    Child processes that unpickle a function of the file import its module by name. They guard what this process guards.
    """
    if os.getpid() not in _shim_folders:
        folder = Path(tempfile.mkdtemp(prefix="nonet-own-"))
        _shim_folders[os.getpid()] = folder
        sys.path.append(str(folder))
        atexit.register(_remove_shim_folder, os.getpid(), folder)
    state = list_trust(on_this_node=True)
    lines = [
        "import sys",
        "from nonet.trust import TrustState, take_trust",
        f"take_trust(TrustState({state.references!r}, {state.hashes!r}, {state.views!r}))",
        f"sys.path.append({str(path.parent)!r})",
        f"__file__ = {str(path)!r}",
        f"exec(compile({content!r}, __file__, 'exec'))",
    ]
    (_shim_folders[os.getpid()] / f"{module_name}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _remove_shim_folder(process: int, folder: Path) -> None:
    """Remove a folder if this process is the one that created it, and not a forked child at its exit."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def import_name(module: str, title: str, use: str) -> ModuleType:
    """Import an installed module and return it.

    Args:
        module: The dotted name of the module.
        title: The start of error messages.
        use: The reference that names the module.

    Raises:
        ConfigError: The module cannot be imported, or a run names it that is not approved; the message is one line.
    """
    check_reference(use, title)
    try:
        return importlib.import_module(module)
    except BaseException as error:
        raise _to_config_error(error, title) from error


def _to_config_error(error: BaseException, title: str) -> BaseException:
    """Return an import failure as a ConfigError of one line; an interrupt such as Ctrl-C is returned unchanged."""
    if not isinstance(error, (Exception, SystemExit)):
        return error
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(f"{title}: the import failed: {cause}")
