"""The versions of a run's catalogue; `nonet items add` creates a version by adding or withdrawing items.

A later version appends items to the dense index of the version before it, so the indices in events and weights
stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nonet.atomic import refuse_damage
from nonet.controller.record import CATALOGUES, RunFolder, fetch_artifacts
from nonet.errors import CheckpointError
from nonet.models.generation import Corpus

_MAX_KEPT = 2  # versions that stay in memory besides the first, the newest and the one that is asked for


class CatalogueVersions:
    """The versions of a run's catalogue; each is loaded when it is used, and few stay in memory.

    Args:
        folder: The run's folder.
        folders: Folders of the artifacts of the first version, by kind.
        first: The corpus of the first version, with which the run was trained.
    """

    def __init__(self, folder: RunFolder, folders: Mapping[str, str], first: Corpus):
        self._folder, self._first = folder, first
        self._corpus_by_version = {first.trie.version: first}
        # (version, artifact folders by kind), oldest first, as read from the file in the state below
        self._listed: list[tuple[str, dict[str, str]]] = [(first.trie.version, dict(folders))]
        self._listed_state: tuple[int, ...] = ()

    def __contains__(self, version: str) -> bool:
        return version in dict(self._list_versions())

    def get_corpus(self, version: str) -> Corpus | None:
        """Return the corpus of a version of the catalogue; None if the run has no such version."""
        corpus = self._corpus_by_version.get(version)
        if corpus is None:
            listed = self._list_versions()
            folders = dict(listed).get(version)
            if folders is None:
                return None
            corpus = self._corpus_by_version[version] = Corpus.load(folders)
            needed = (self._first.trie.version, version, listed[-1][0])
            for other in [name for name in self._corpus_by_version if name not in needed][:-_MAX_KEPT]:
                self._corpus_by_version.pop(other, None)
        return corpus

    def get_newest(self) -> Corpus:
        """Return the corpus of the newest catalogue."""
        newest_version, _ = self._list_versions()[-1]
        corpus = self.get_corpus(newest_version)
        return self._first if corpus is None else corpus

    def _list_versions(self) -> list[tuple[str, dict[str, str]]]:
        """Return (version, artifact folders) of all catalogues, oldest first, from the run's `CATALOGUES` file.

        Raises:
            CheckpointError: The file was read before and has disappeared.
        """
        path = Path(self._folder.path) / CATALOGUES
        try:
            stat = path.stat()
        except OSError:  # no version was added
            if self._listed_state:
                raise CheckpointError(
                    f"{path} is missing, so it is not known which items were added or withdrawn; put it back from a copy"
                ) from None
            return self._listed[:1]
        state = stat.st_mtime_ns, stat.st_ino, stat.st_size
        if state != self._listed_state:
            with refuse_damage(path):
                later = [
                    (catalogue["version"], fetch_artifacts(catalogue["artifacts"]))
                    for catalogue in self._folder.read_catalogues()
                ]
            self._listed = [*self._listed[:1], *later]
            self._listed_state = state
        return self._listed
