"""The code that a folder of a run or an export has, and the hashes by which a user approves it.

The code of a folder has parts, each of which has a hash of its own:

- "", the folder itself: all files below `sources`, Python and compiled files elsewhere, `sources.json`, and the references of
  the stored scenario, or of the settings of an export. References are texts such as `file.py:NAME` and `package.module:NAME`.
  The environments of pools count as references too, because they choose the program that workers run, and so do addresses of
  servers, and the variables whose values they get (`token`).
- `sources/attached-...`, the files of a reward that was attached to the run.
- the reference of each attached reward.

The address to which versions of the run are pushed (`serving/registry.uri`) is none of these parts: it is approved by a hash
of its own (`make_registry_part`), so that whoever approves code approves no address.

Files in `__pycache__` are not part of the code, and links are never imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from nonet import yaml
from nonet.atomic import open_file, read_json, refuse_damage
from nonet.errors import ConfigError
from nonet.journal import LineJournal

SOURCES = "sources"
_SOURCES_LIST = "sources.json"
_COMMANDS = "commands.jsonl"
_MAX_ADDRESS_BYTES = 4096
_ATTACHED = re.compile(rf"{SOURCES}/attached-[^/]+")
_CODE_ENDINGS = (".py", ".pyc", ".so")
_HASH_DIGITS = 32
ENVIRONMENT = "env "  # the beginning of the reference that stands for the values of `_USED_KEYS`
_USED_KEYS = ("env", "token")  # the environment of a pool, and the variable whose value a server gets
_LINK, _NO_FILE = "link", "missing"
# Every text that may be imported: a file, or a module with a name. A text too many does no harm.
_REFERENCE = re.compile(r"[^\n]*\.py(:[^\s/]+)?|[^\s:/]+:[^\s/:]+")
# Servers that a run asks, such as those of rewards, which get histories of users; object storage is only read. What stands
# behind a question mark may name another server of a storage, which gets credentials.
_SERVER = re.compile(
    r"[\s\x00-\x20]*(?!(s3|gs|az|abfss?|file|hdfs)://[^?]*$)[a-z][a-z0-9+.-]*://.*", re.IGNORECASE | re.DOTALL
)


@dataclass(slots=True)
class CodePart:
    """A part of the code of a folder.

    Attributes:
        files: The SHA-256 of each file by its path in the folder.
        references: The references to code.
    """

    files: dict[str, str] = field(default_factory=dict)
    references: set[str] = field(default_factory=set)

    @property
    def has_files(self) -> bool:
        """Whether there are files besides `sources.json`, which a run without code has too."""
        return bool(self.files.keys() - {_SOURCES_LIST})

    @property
    def hash(self) -> str:
        """The hash that a user approves; "" if the part has no code, so that an empty part is never approved."""
        if not self.has_files and not self.references:
            return ""
        lines = [f"{path}\0{content}\n" for path, content in sorted(self.files.items())]
        lines += [f"\0{reference}\n" for reference in sorted(self.references)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:_HASH_DIGITS]


def read_code_parts(folder: Path) -> dict[str, CodePart]:
    """Read the parts of the code of a folder, "" among them, by their names."""
    parts = {"": CodePart(references=_read_references(folder))}
    for path, content in _walk_code(folder):
        attached = _ATTACHED.match(path)
        parts.setdefault(attached[0] if attached else "", CodePart()).files[path] = content
    for reference in _list_attached(folder):
        parts[reference] = CodePart(references={reference})
    return parts


def read_registry_address(file: Path) -> str:
    """Return the address that was used last for the versions of a run, from serving/registry.uri; "" if there is none.

    Raises:
        ConfigError: The file is damaged.
    """
    if not file.exists():
        return ""
    with open_file(file) as source:
        content = source.read(_MAX_ADDRESS_BYTES + 1)
    address = content.decode("utf-8", "replace").strip()
    if len(content) > _MAX_ADDRESS_BYTES or not address.isprintable():
        raise ConfigError(f"{file} is not the address of a registry; remove it, or copy it again")
    return address


def make_registry_part(serving: Path, address: str) -> CodePart:
    """Return what a user approves for versions in a serving folder of this machine to be at an address."""
    return CodePart(references={f"registry {address} of {serving.resolve()}"})


def read_copy_records(run: Path) -> list[dict[str, Any]]:
    """Read which copies of the user's own files a run has: {"use", "copy", "sha256"} of each, [] without a list.

    Raises:
        ConfigError: The list is damaged, or has a copy outside of the run's `sources`, or one that is reached by a link.
    """
    sources_list, sources = run / _SOURCES_LIST, run / SOURCES
    try:
        records = read_json(sources_list)
    except FileNotFoundError:
        return []
    with refuse_damage(sources_list):
        copies = [(str(record["use"]), str(record["copy"]), str(record["sha256"])) for record in records]
    for _, copy, _ in copies:
        path = PurePosixPath(copy)
        places = [sources, *(sources / parent for parent in (path, *path.parents))]
        is_inside = str(path) == copy and not path.is_absolute() and ".." not in path.parts
        if not is_inside or any(place.is_symlink() for place in places):
            raise ConfigError(
                f"{sources_list}: {copy!r} leads out of {sources}; the copies of a run are files there, so start a new run"
            )
    return records


def needs_approval(name: str, part: CodePart) -> bool:
    """Return whether workers would run or ask something of a part whatever else they do.

    That is files, environments, servers and attached rewards. Other references are checked when they are
    imported, since a text such as a time of day may look like one.

    Args:
        name: The name of the part.
        part: The part.
    """
    return bool(name) or part.has_files or any(map(_is_used_anyway, part.references))


def _is_used_anyway(reference: str) -> bool:
    """Return whether a reference is used without a check of its own: an environment, or a server."""
    return reference.startswith(ENVIRONMENT) or bool(_SERVER.fullmatch(reference))


def has_reference_form(use: str) -> bool:
    """Return whether `list_references` would find a text as a reference to code; nothing else is ever imported."""
    return bool(_REFERENCE.fullmatch(use))


def find_part(path: str) -> str:
    """Return the name of the part that a file belongs to, by its path in the folder."""
    attached = _ATTACHED.match(path)
    return attached[0] if attached else ""


def list_references(value: Any) -> set[str]:
    """Return the references to code in plain data, such as the document of a scenario, at any depth."""
    if isinstance(value, str):
        return {value} if _REFERENCE.fullmatch(value) or _SERVER.fullmatch(value) else set()
    if isinstance(value, dict):
        kept = {name: value[name] for name in _USED_KEYS if value.get(name)}
        references = {f"{ENVIRONMENT}{_write_sorted(kept)}"} if kept else set[str]()
        return references.union(*(list_references(child) for entry in value.items() for child in entry))
    return set[str]().union(*map(list_references, value)) if isinstance(value, list | tuple) else set()


def _write_sorted(value: Any) -> str:
    """Return plain data as JSON with sorted keys; keys of a hostile scenario need not be texts."""

    def name_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key if isinstance(key, str) else repr(key): name_keys(child) for key, child in value.items()
            }
        return [name_keys(child) for child in value] if isinstance(value, list | tuple) else value

    return json.dumps(name_keys(value), sort_keys=True, default=str)


def _walk_code(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the path in the folder and the SHA-256 of each file of its code."""
    for parent, subfolders, names in os.walk(folder):
        relative = Path(parent).relative_to(folder)
        is_source = relative.parts[:1] == (SOURCES,)
        links = [name for name in subfolders if (Path(parent) / name).is_symlink()]
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__" and name not in links)
        if is_source:
            names = [*names, *links]
        for name in names:
            path = (relative / name).as_posix()
            if is_source or name.endswith(_CODE_ENDINGS) or path == _SOURCES_LIST:
                yield path, _hash_file(Path(parent) / name)


def _hash_file(file: Path) -> str:
    """Return the SHA-256 of a file; a word for a link and for what is no file."""
    if file.is_symlink():
        return _LINK
    if not file.is_file():
        return _NO_FILE
    with open_file(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _read_references(folder: Path) -> set[str]:
    """Return the references of the stored scenario, or of the settings of an export."""
    references = set[str]()
    if (folder / "scenario.yaml").is_file():
        try:
            references |= list_references(yaml.read(folder / "scenario.yaml"))
        except ConfigError:  # whoever loads the scenario reports it
            references.add("scenario.yaml is not valid YAML")
    if (folder / "export.json").is_file():
        references |= list_references(select_export_settings(read_json(folder / "export.json")))
    return references


def select_export_settings(description: Any) -> Any:
    """Return the parts of the description of an export that may name code."""
    return [description.get("setup"), description.get("joins")] if isinstance(description, dict) else []


def _list_attached(folder: Path) -> Iterator[str]:
    """Yield what the rewards that were attached to a run name, unless they were refused."""
    for _, line in LineJournal(folder / _COMMANDS, read_only=True).iterate_lines():
        try:
            record = json.loads(line)["r"]
            use = (record.get("options") or {}).get("use")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a damaged line, whose reward is checked when the run attaches it again
        if record.get("verb") == "attach" and "refused" not in record and is_code_reference(use):
            yield str(use)


def is_code_reference(use: Any) -> bool:
    """Return whether the `use` of a plug-in or reward is more than a shipped name: a file, a module, an actor or an address."""
    return isinstance(use, str) and (use.endswith(".py") or ":" in use)
