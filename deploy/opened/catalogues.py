"""The versions of a run's catalogue; `nonet items add` creates a version by adding or withdrawing items.

A later version appends items to the dense index of the version before it, so the indices in events and weights
stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nonet.controller.record import CATALOGUES, RunFolder, fetch_artifacts
from nonet.models.generation import Corpus


class CatalogueVersions:
    """The versions of a run's catalogue; each is loaded when it is first used.

    Args:
        folder: The run's folder.
        folders: Folders of the artifacts of the first version, by kind.
        first: The corpus of the first version, with which the run was trained.
    """

    def __init__(self, folder: RunFolder, folders: Mapping[str, str], first: Corpus):
        self._folder, self._first = folder, first
        self._corpus_by_version = {first.trie.version: first}
        # (version, artifact folders by kind), oldest first, as read from the file with the modification time below
        self._listed: list[tuple[str, dict[str, str]]] = [(first.trie.version, dict(folders))]
        self._listed_mtime_ns: int | None = None

    def get_corpus(self, version: str) -> Corpus | None:
        """Return the corpus of a version of the catalogue; None if the run has no such version."""
        if version not in self._corpus_by_version:
            folders = dict(self._list_versions()).get(version)
            if folders is None:
                return None
            self._corpus_by_version[version] = Corpus.load(folders)
        return self._corpus_by_version[version]

    def get_newest(self) -> Corpus:
        """Return the corpus of the newest catalogue."""
        newest_version, _ = self._list_versions()[-1]
        corpus = self.get_corpus(newest_version)
        return self._first if corpus is None else corpus

    def _list_versions(self) -> list[tuple[str, dict[str, str]]]:
        """Return (version, artifact folders) of all catalogues, oldest first, from the run's `CATALOGUES` file."""
        path = Path(self._folder.path) / CATALOGUES
        try:
            mtime_ns = path.stat().st_mtime_ns
        except OSError:  # no version was added
            return self._listed[:1]
        if mtime_ns != self._listed_mtime_ns:
            later = [
                (catalogue["version"], fetch_artifacts(catalogue["artifacts"]))
                for catalogue in self._folder.read_catalogues()
            ]
            self._listed = [*self._listed[:1], *later]
            self._listed_mtime_ns = mtime_ns
        return self._listed
