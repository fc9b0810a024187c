"""Which code of run folders and exports this user has approved.

A folder of a run or an export may come from somebody else, such as from a shared bucket. Opening it guards it. From then on

- a file in it is imported only if the hash of the folder's code (`nonet.run_code`) is approved, and only from the very bytes
  that were hashed: modules beside it too, and never from compiled files (`_GuardedLoader`);
- what its scenario names, `package.module:NAME`, is imported only if the hash is approved, which covers these names.

A run that this user started on this machine is approved. `--trust` approves the folders that a command opens, as they are
when it opens them, and is remembered in ~/.config/nonet/trusted; NONET_TRUST approves hashes, separated by commas, on machines
that remember nothing. Workers of Ray receive the guarded folders and the approved hashes of the process that starts them.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from nonet.errors import ConfigError
from nonet.run_code import (
    ENVIRONMENT,
    CodePart,
    find_part,
    has_reference_form,
    is_code_reference,
    list_references,
    make_registry_part,
    needs_approval,
    read_code_parts,
)


@dataclass(frozen=True, slots=True)
class TrustState:
    """What a process knows about code, for the processes that it starts.

    Attributes:
        references: The guarded folders, with the references of the scenarios that were read there.
        hashes: The approved hashes of code that the process has checked.
        views: Those of the folders that other nodes may lack.
    """

    references: dict[str, list[str]] = field(default_factory=dict)
    hashes: list[str] = field(default_factory=list)
    views: list[str] = field(default_factory=list)


_guarded: dict[Path, set[str]] = {}  # the references of the scenarios that were read in each guarded folder
_views: set[Path] = set()  # guarded folders that only processes of this node have
_approved: set[str] = set()  # hashes that this process has approved, received, or found approved
_settings = {"approves": False, "imports": True}


def guard_folder(folder: Path, *, approves: bool = True, is_view: bool = False) -> None:
    """Import code of a folder from now on only if the user has approved it.

    Args:
        folder: The folder.
        approves: Whether `--trust` approves its present code. Code that it gets later is not approved.
        is_view: Whether only processes of this node have the folder.
    """
    folder = folder.absolute()
    if folder in _guarded:
        return
    _guarded[folder] = set()
    if is_view:
        _views.add(folder)
    _find_modules_anew()
    if approves and _settings["approves"]:
        approve_code(folder)


def guard_work_folder(folder: Path, view: Path) -> None:
    """Guard the folder in which a run is continued as the view in which it was opened, by the same approval.

    Args:
        folder: The work folder.
        view: The folder in which the run was opened.
    """
    guard_folder(folder, approves=False)
    _guarded[folder.absolute()] |= _guarded.get(view.absolute(), set())


def is_guarded(folder: Path) -> bool:
    """Return whether a folder is guarded, or in a guarded one."""
    return bool(_find_guards(folder))


def approve_opened_folders() -> None:
    """Approve the code of all folders that this process opens, and remember it: the option --trust."""
    _settings["approves"] = True


@contextmanager
def import_no_code() -> Iterator[None]:
    """Import no code of a guarded folder while a block runs, whether or not it is approved."""
    before, _settings["imports"] = _settings["imports"], False
    try:
        yield
    finally:
        _settings["imports"] = before


def compute_code_hash(folder: Path) -> str:
    """Return the hashes of the parts of a folder's code, separated by commas, as NONET_TRUST takes them; "" without code."""
    return _join_hashes(read_code_parts(folder))


def approve_code(folder: Path) -> None:
    """Remember that this user has approved the present code of a folder."""
    approve_parts(read_code_parts(folder).values())


def approve_parts(parts: Collection[CodePart]) -> None:
    """Remember that this user has approved parts of code, such as those of a run that it has started."""
    _remember_hashes({part.hash for part in parts} - {""})


def _remember_hashes(hashes: set[str]) -> None:
    """Append hashes to the approved ones of this user."""
    unknown = hashes - _read_approved()
    _approved.update(hashes)
    if not unknown:
        return
    file = _find_approvals()
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        # A short append, which no other process divides, and behind a line that a killed process did not end.
        os.write(descriptor, "".join(f"\n{code_hash}\n" for code_hash in sorted(unknown)).encode())
    finally:
        os.close(descriptor)


def approve_content(content: bytes) -> None:
    """Remember that this user has written a text that decides what code runs, such as the code of a board's scenario."""
    _remember_hashes({hashlib.sha256(content).hexdigest()})


def is_approved_content(content: bytes) -> bool:
    """Return whether this user has written a text (`approve_content`), or approves by --trust what this process opens."""
    return _settings["approves"] or hashlib.sha256(content).hexdigest() in _read_approved()


def is_approved(folder: Path) -> bool:
    """Return whether this user has approved the code of a folder. A folder without code is not approved."""
    hashes = {part.hash for part in read_code_parts(folder).values()} - {""}
    return bool(hashes) and hashes <= _read_approved()


def add_references(folder: Path, document: Any, changes: Collection[str] = ()) -> None:
    """Guard what a scenario or an export names, if it was read in a guarded folder.

    Args:
        folder: The folder of the file that was read.
        document: Its plain data.
        changes: Changes of the user, such as `a.b=c`; what they name, and environments with values of them, are not guarded.
    """
    references = {
        reference
        for reference in list_references(document)
        if not any(reference in change for change in changes)
        and not (changes and reference.startswith(ENVIRONMENT))
    }
    for guard, _ in _find_guards(folder):
        _guarded[guard] |= references


def add_stored_references(file: Path, document: Any) -> None:
    """Guard what a stored document of a guarded folder names, such as the settings of a model in a checkpoint.

    The approved scenario or export must name it too. Files of the folder itself are checked when they are imported.

    Args:
        file: The file that was read.
        document: The part of its plain data that may name code.
    """
    for folder, _ in _find_guards(file):
        for reference in list_references(document):
            path = folder / reference.partition(":")[0]
            if not path.is_file() or folder not in dict(_find_guards(path)):
                _guarded[folder].add(reference)


def check_folder(folder: Path, title: str) -> None:
    """Check that workers may run the code of a guarded folder, before any of them starts.

    Raises:
        ConfigError: It is not approved.
    """
    for guard, _ in _find_guards(folder):
        parts = read_code_parts(guard)
        needed = {name: part for name, part in parts.items() if needs_approval(name, part)}
        _check_parts(guard, needed, title, "", parts)


def check_attached(folder: Path, use: Any, title: str) -> None:
    """Check that a reward may be attached to the run of a guarded folder: the user has attached or approved it.

    Args:
        folder: The folder of the run.
        use: The file, module or address of the reward; a shipped name needs no approval.
        title: The start of error messages.

    Raises:
        ConfigError: It is not approved.
    """
    if is_code_reference(use) and _find_guards(folder):
        _check_parts(folder, {use: CodePart(references={use})}, title, use)


def check_registry(serving: Path, address: str) -> None:
    """Check that the versions of the run of a guarded folder may be at the address that the folder names.

    An address that came with a folder would let whoever sent it read what is published from here, and replace it.

    Args:
        serving: RUN/serving.
        address: The address in its `registry.uri`.

    Raises:
        ConfigError: This user has neither given nor approved the address for this folder.
    """
    part = make_registry_part(serving, address)
    if _find_guards(serving) and part.hash not in _read_approved():
        raise ConfigError(
            f"registry: {serving}/registry.uri names {address}, which you have neither given nor approved for this folder on "
            "this machine; if its versions should be there, give the address to `nonet serve` (registry: ADDRESS), or set "
            f"NONET_TRUST={part.hash}; if not, remove the file"
        )


def approve_registry(serving: Path, address: str) -> None:
    """Remember that this user has given an address for the versions in a serving folder, if a home can be written."""
    with suppress(OSError):
        approve_parts([make_registry_part(serving, address)])


def check_reference(use: str, title: str, file: Path | None = None) -> None:
    """Check that `package.module:NAME` or `file.py:NAME` may be imported.

    Args:
        use: The reference.
        title: The start of error messages.
        file: The file that it names.

    Raises:
        ConfigError: The scenario of a guarded folder names it, and is not approved; it has not this form; or this command
            imports no code, and it names a file.
    """
    check_form(use, title)
    if file is not None and not _settings["imports"]:
        raise ConfigError(f"{title}: {use} is code, which this command does not run")
    for folder, references in _guarded.items():
        if use not in references or (folder in _views and not folder.exists()):
            continue
        if file is None or folder not in dict(_find_guards(file)):  # `read_code` checks files of the folder
            parts = read_code_parts(folder)
            _check_parts(folder, {"": parts[""]}, title, use, parts)


def check_form(use: str, title: str) -> None:
    """Raise ConfigError for a text that guarded folders would not know as a reference to code."""
    if not has_reference_form(use):
        raise ConfigError(
            f"{title}: {use!r} is no reference; write file.py:Name or package.module:Name, without blanks"
        )


def read_code(file: Path, title: str) -> bytes:
    """Return the content of a Python file that is to be imported; nothing else of the file may be imported.

    Args:
        file: The file.
        title: The start of error messages.

    Raises:
        ConfigError: It is in a guarded folder whose code is not approved, or is not a file of this code.
    """
    guards = _find_guards(file)
    expected = {_check_file(folder, path, title) for folder, path in guards}
    content = file.read_bytes()
    if guards and expected != {hashlib.sha256(content).hexdigest()}:
        raise ConfigError(f"{title}: {file.name} changed while it was imported; start again")
    return content


def list_trust(*, on_this_node: bool = False) -> TrustState:
    """Return what the processes that this one starts need to know; on this node, also about views."""
    folders = _guarded.keys() - (set() if on_this_node else _views)
    references = {str(folder): sorted(_guarded[folder]) for folder in sorted(folders)}
    return TrustState(references, sorted(_approved), [str(folder) for folder in folders & _views])


def take_trust(state: TrustState) -> None:
    """Guard the folders of another process, and approve what it has approved."""
    _approved.update(state.hashes)
    for folder, names in state.references.items():
        _guarded.setdefault(Path(folder), set()).update(names)
    _views.update(map(Path, state.views))
    _find_modules_anew()


class ContentLoader(SourceFileLoader):
    """Loads a module from content that has been read, and neither reads nor writes compiled files."""

    def __init__(self, fullname: str, path: str, content: bytes):
        super().__init__(fullname, path)
        self._content = content

    def get_code(self, fullname: str) -> CodeType:
        """Compile the content."""
        return self.source_to_code(self._content, self.path)  # pyright: ignore[reportArgumentType]


class _GuardedLoader(SourceFileLoader):
    """Loads a module of a guarded folder from the content that was checked, and neither reads nor writes compiled files."""

    def get_code(self, fullname: str) -> CodeType:
        """Check and compile the file."""
        return self.source_to_code(read_code(Path(self.path), f"import {fullname}"), self.path)  # pyright: ignore[reportArgumentType]


class _GuardedExtensionLoader(ExtensionFileLoader):
    """Loads a compiled module of a guarded folder from a private copy of the content that was checked."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Check, copy and load the file."""
        folder = Path(tempfile.mkdtemp(prefix="nonet-extension-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        copy = folder / Path(self.path).name
        copy.write_bytes(read_code(Path(self.path), f"import {self.name}"))
        self.path = spec.origin = str(copy)
        return super().create_module(spec)


def _find_in_guarded_folder(place: str) -> FileFinder:
    """Return the finder of modules in a folder on Python's path. Raises ImportError if the folder is not guarded."""
    if not _find_guards(Path(place)) or Path(place).is_file():  # a file is a script that the user runs
        raise ImportError(f"{place} is no guarded folder")
    source, extension = (_GuardedLoader, SOURCE_SUFFIXES), (_GuardedExtensionLoader, EXTENSION_SUFFIXES)
    return FileFinder(place, extension, source)


def _find_modules_anew() -> None:
    """Let Python search guarded folders by `_find_in_guarded_folder`, also those that it has searched before."""
    if _find_in_guarded_folder not in sys.path_hooks:
        sys.path_hooks.insert(0, _find_in_guarded_folder)
    roots = _list_roots()
    for place in list(sys.path_importer_cache):
        if _find_guards(Path(place), roots):
            del sys.path_importer_cache[place]


def _list_roots() -> list[tuple[Path, Path]]:
    """Return each guarded folder with its path, and with the path that links lead to."""
    return [(folder, root) for folder in _guarded for root in dict.fromkeys((folder, folder.resolve()))]


def _find_guards(place: Path, roots: Sequence[tuple[Path, Path]] | None = None) -> list[tuple[Path, str]]:
    """Return the guarded folders that a file or folder is in, or leads to by links, each with its path there.

    Args:
        place: The file or folder.
        roots: What `_list_roots` returned just now; None to list them.
    """
    places = dict.fromkeys((Path(os.path.normpath(place.absolute())), place.resolve()))
    return [
        (folder, place.relative_to(root).as_posix())
        for folder, root in (_list_roots() if roots is None else roots)
        for place in places
        if place.is_relative_to(root)
    ]


def _check_file(folder: Path, path: str, title: str) -> str:
    """Return the SHA-256 of a file of the approved code of a folder.

    Raises:
        ConfigError: The code is not approved, or does not have this file.
    """
    parts = read_code_parts(folder)
    own = find_part(path)
    needed = {name: parts[name] for name in ("", own) if name in parts and parts[name].hash}
    _check_parts(folder, needed, title, Path(path).name, parts)
    expected = parts[own].files.get(path, "") if own in parts else ""
    if len(expected) != hashlib.sha256().digest_size * 2:
        raise ConfigError(
            f"{title}: {path} is not part of the code of {folder.name}, since it is a link, in a cache of compiled code, or no "
            "file; put a Python file there, or remove it"
        )
    return expected


def _check_parts(
    folder: Path,
    needed: dict[str, CodePart],
    title: str,
    what: str,
    parts: dict[str, CodePart] | None = None,
) -> None:
    """Check that parts of a folder's code are approved, and that the scenarios that were read there are the approved one.

    Args:
        folder: The folder.
        needed: The parts that must be approved, by name.
        title: The start of error messages.
        what: What is to be imported.
        parts: All parts, as a command that approves them names them; by default those that are needed.

    Raises:
        ConfigError: They are not approved, or this command imports no code.
    """
    if not _settings["imports"]:
        raise ConfigError(f"{title}: {what} is code of {folder.name}, which this command does not run")
    parts, approved = parts or needed, _read_approved()
    _approved.update(
        approved & {part.hash for part in parts.values()}
    )  # for processes on nodes that remember nothing
    if not {part.hash for part in needed.values()} <= approved:
        detail = f" ({what})" if what else ""
        subject = "it" if title == folder.name else folder.name
        other = " (it names other code now)" if os.environ.get("NONET_TRUST") else ""
        raise ConfigError(
            f"{title}: {subject} has code of its own{detail} that you have neither started nor approved on this machine; "
            f"read it in {folder}, then add --trust, or set NONET_TRUST={_join_hashes(parts)}{other}"
        )
    changed = _guarded.get(folder, set()) - parts[""].references if "" in parts else set()
    if changed:
        raise ConfigError(
            f"{title}: the scenario of {folder.name} changed while it was opened (it named {min(changed)}); start again"
        )


def _join_hashes(parts: dict[str, CodePart]) -> str:
    """Return the hashes of parts, separated by commas."""
    return ",".join(dict.fromkeys(part.hash for part in parts.values() if part.hash))


def _find_approvals() -> Path:
    """Return the file of approved hashes, one per line."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "nonet" / "trusted"


def _read_approved() -> set[str]:
    """Return the approved hashes, of which "" is never one."""
    file = _find_approvals()
    remembered = file.read_text(encoding="utf-8").split() if file.is_file() else []
    return {*_approved, *remembered, *filter(None, os.environ.get("NONET_TRUST", "").split(","))}
