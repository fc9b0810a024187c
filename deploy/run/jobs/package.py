"""The package of a job: one zip archive of the files that a run on a cluster needs, with their checksums.

All files that the scenario names are in it, even if `.gitignore` excludes them: tables, stores, models, rewards, and the files
beside the rewards' files. Of the other files of the scenario's folder, those are in it that Ray would upload. The same files
make the same archive, which Ray then uploads and unpacks once.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nonet.controller.scenario import LIBRARY, Scenario, read_document, to_document
from nonet.controller.setup import find_files_beside, is_private_key, list_named_files, walk_files
from nonet.errors import ConfigError

MAX_PACKAGE_BYTES = 10 << 20
_LISTING = "submitted.json"  # the `PackageListing` in a package
_SHOWN_FILES = 3  # number of the largest files that an error names
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # of every file, so that the archive only depends on their contents
_CHUNK_BYTES = 1 << 20
_quiet_log = logging.getLogger(__name__)  # Ray reports each file that it excludes, as information


@dataclass(frozen=True, slots=True)
class PackageListing:
    """What a package contains and what its job needs.

    Attributes:
        scenario: The name of the scenario's file.
        changes: Changes of the scenario, each `a.b=c`.
        env: Names of environment variables that the job must have.
        nonet: The version of Nonet that made the package.
        checksums: The sha256 of each file that the scenario names.
    """

    scenario: str
    changes: list[str]
    env: list[str]
    nonet: str
    checksums: dict[str, str]


def write_package(
    target: Path, scenario: Scenario, file: Path, changes: list[str], env: list[str], version: str
) -> None:
    """Write the package of a scenario.

    Args:
        target: The zip archive to write.
        scenario: The scenario, which names files.
        file: The scenario's file.
        changes: Changes of the scenario, each `a.b=c`.
        env: Names of environment variables that the job must have.
        version: The version of Nonet.

    Raises:
        ConfigError: A file is outside of the scenario's folder, or the package is larger than `MAX_PACKAGE_BYTES`.
    """
    folder = file.parent
    named_files = _find_named_files(to_document(scenario), folder) | _find_files_beside(scenario, folder)
    named_files |= {file.absolute(), *_find_parents(file)}
    checksums = {str(path.relative_to(folder)): _hash_file(path) for path in sorted(named_files)}
    listing = PackageListing(file.name, changes, env, version, checksums)
    files = {str(path.relative_to(folder)): path for path in {*_iterate_files(folder), *named_files}}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted(files.items()):
            _add_file(archive, name, path)
            if target.stat().st_size > MAX_PACKAGE_BYTES:
                break
        archive.writestr(zipfile.ZipInfo(_LISTING, _ZIP_TIME), json.dumps(asdict(listing), sort_keys=True))
    if target.stat().st_size > MAX_PACKAGE_BYTES:
        raise ConfigError(_describe_excess(file.name, files))


def _add_file(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    """Add a file to an archive without its times; stop early if the archive becomes too large."""
    info = zipfile.ZipInfo(name, _ZIP_TIME)
    info.external_attr = (path.stat().st_mode & 0o777) << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as entry:
        written_bytes = 0
        while (chunk := source.read(_CHUNK_BYTES)) and written_bytes <= MAX_PACKAGE_BYTES:
            entry.write(chunk)
            written_bytes = archive.fp.tell() if archive.fp else 0


def _describe_excess(scenario_name: str, files: Mapping[str, Path]) -> str:
    """Return the message about files that are too large for a package."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    large = [name for name in sizes if sizes[name] > MAX_PACKAGE_BYTES // 100] or list(sizes)
    largest = sorted(large, key=lambda name: -sizes[name])[:_SHOWN_FILES]
    shown = ", ".join(f"{name} ({_format_mib(sizes[name])})" for name in largest)
    return (
        f"{scenario_name} and its files have {_format_mib(sum(sizes.values()))}, and more than "
        f"{_format_mib(MAX_PACKAGE_BYTES)} packed, which a job may carry; the largest are {shown}. Put tables and models on a "
        "store that the cluster reaches and give their addresses (storage: s3://..., s3://bucket/file), or list files that the "
        "scenario does not need in .rayignore"
    )


def _format_mib(size: int) -> str:
    """Format a number of bytes in MiB."""
    return f"{size / (1 << 20):.1f} MiB"


def read_listing(folder: Path) -> PackageListing:
    """Read the listing of an unpacked package, and check that the files that the scenario names have arrived unchanged.

    Args:
        folder: The job's working directory.

    Raises:
        ConfigError: There is no listing, or a file is missing or differs.
    """
    path = folder / _LISTING
    if not path.is_file():
        raise ConfigError(
            f"{folder} is not the folder of a submitted job; use: nonet submit SCENARIO --address URL"
        )
    listing = PackageListing(**json.loads(path.read_text(encoding="utf-8")))
    wrong_names = [
        name
        for name, sha256 in listing.checksums.items()
        if not (folder / name).is_file() or _hash_file(folder / name) != sha256
    ]
    if wrong_names:
        raise ConfigError(
            f"{len(wrong_names)} of {len(listing.checksums)} files that the scenario names did not arrive completely, "
            f"the first is {wrong_names[0]}; submit again"
        )
    return listing


def _iterate_files(folder: Path) -> Iterator[Path]:
    """Yield the files of `walk_files` that neither .gitignore nor .rayignore excludes, as Ray reads these files."""
    from ray._private.runtime_env.packaging import get_excludes_from_ignore_files

    @cache
    def read_excludes(path: Path) -> tuple[Any, ...]:
        """Return the predicates of the ignore files of a folder and of those above it."""
        above = read_excludes(path.parent) if path != root else ()
        return (*above, *get_excludes_from_ignore_files(path, include_gitignore=True, logger=_quiet_log))

    root = folder.absolute()
    yield from walk_files(root, lambda path: any(excludes(path) for excludes in read_excludes(path.parent)))


def _find_named_files(value: Any, folder: Path) -> set[Path]:
    """Return the files below a folder that a scenario's texts name, including the files of folders and patterns.

    Private keys stay, also if a text names them.

    Args:
        value: A part of the scenario's document: a map, a list, a text or another value.
        folder: The scenario's folder.

    Raises:
        ConfigError: A relative path leads out of the folder, whose files alone are sent.
    """
    if isinstance(value, dict):
        return set().union(*(_find_named_files(part, folder) for part in value.values()))
    if isinstance(value, list):
        return set().union(*(_find_named_files(part, folder) for part in value))
    if not isinstance(value, str) or not value or "://" in value or "\n" in value or os.path.isabs(value):
        return set()
    pattern = value.partition(".py:")[0] + (".py" if ".py:" in value else "")  # `file.py:NAME` names a file
    matches = glob.glob(str(Path(glob.escape(str(folder))) / pattern), recursive=True)
    root = folder.absolute()
    files: set[Path] = set()
    for match in matches:
        path = Path(os.path.normpath(Path(match).absolute()))
        if path == root:
            continue
        if not path.is_relative_to(root):
            raise ConfigError(
                f"{value} is outside of {folder}, and only files in that folder are sent with the job; move it there, or give an "
                "absolute path that all nodes of the cluster have"
            )
        found_files = [path] if path.is_file() else walk_files(path)
        files.update(file for file in found_files if not is_private_key(file))
    return files


def _find_files_beside(scenario: Any, folder: Path) -> set[Path]:
    """Return the files of the scenario's folder that are beside the Python files that a scenario names."""
    root = folder.absolute()
    files_beside = [
        file_beside
        for named_file in list_named_files(scenario)
        if (root / named_file).is_file()
        for file_beside in find_files_beside(root / named_file)
    ]
    return {path for path in files_beside if path.is_relative_to(root)}


def _find_parents(path: Path) -> set[Path]:
    """Return the files that a scenario extends, except shipped ones, which the cluster has.

    Raises:
        ConfigError: One is outside of the scenario's folder, whose files alone are sent.
    """
    parents = {parent for parent in read_document(path).parents if parent.parent != LIBRARY}
    for parent in sorted(parents):
        if not parent.is_relative_to(path.parent):
            raise ConfigError(
                f"extends: {parent} is outside of {path.parent}, and only files in that folder are sent with the job; "
                "move it there"
            )
    return parents


def _hash_file(path: Path) -> str:
    """Return the sha256 of a file's content as hexadecimal digits."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
