"""OpenRun: a run as serving reads it: what its tokenise stage left, how its model is built, and its registry of versions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nonet.controller.record import Checkpoints, Manifest, RunFolder, find_run
from nonet.controller.scenario import Scenario, load_scenario
from nonet.deploy.serving.features.artifacts import artifacts_of
from nonet.deploy.serving.features.catalogues import Catalogues
from nonet.errors import CheckpointError, ConfigError
from nonet.models.generation import Corpus, Recommender
from nonet.samples.tokenised import StoredSequences, UserEvents
from nonet.workers.registry import Contents, Registry, Version, counts_of, model_of, registry_beside
from nonet.workers.roles import RunSetup


@dataclass(frozen=True)
class OpenRun:
    """A run that has tokenised its data. `beside`: where its versions and posted events lie."""

    folder: RunFolder
    scenario: Scenario
    folders: dict[str, str]
    beside: Path

    @classmethod
    def of(cls, run: str | Path, beside: Path | None = None) -> OpenRun:
        """Raises ConfigError where there is no such run, or nothing in it to recommend from. `beside`: RUN/serving by default."""
        folder = find_run(run)
        folders = artifacts_of(folder)
        scenario, _ = load_scenario(folder.scenario)
        return cls(folder, scenario, folders, beside or folder.path / "serving")

    @cached_property
    def setup(self) -> RunSetup:
        """How its model is built and its votes are taken."""
        from nonet.controller.setup import run_setup  # imports Ray, which an export does without

        return run_setup(self.scenario)

    @cached_property
    def corpus(self) -> Corpus:
        """Its items, trie and users' events as the run was made of them."""
        return Corpus.load(self.folders)

    @cached_property
    def catalogues(self) -> Catalogues:
        """The versions of its catalogue."""
        return Catalogues(self.folder, self.folders, self.corpus)

    @cached_property
    def events(self) -> UserEvents | None:
        """The store of users' events that the scenario names (`data.sequences`), those appended since among them."""
        stored = self.setup.stored
        return None if stored is None else stored.opened(self.folders, self.corpus.seq)

    def events_in(self, store: str) -> UserEvents:
        """The events of its users in a store at an address, to which they are written where they are not there yet."""
        stored = StoredSequences(store)
        stored.write(self.corpus.seq, self.corpus.sids, self.folders)
        return stored.opened(self.folders, self.corpus.seq)

    @cached_property
    def registry(self) -> Registry:
        """Its published versions."""
        return registry_beside(self.beside)

    def newest_commit(self) -> tuple[Path, Manifest]:
        """The newest whole commit. Raises ConfigError where there is none."""
        newest = Checkpoints(self.folder.checkpoints).newest()
        if newest is None:
            raise ConfigError(f"{self.folder.id} has no commit yet: there is no model to serve")
        return newest

    def contents(self, commit: Path, manifest: Manifest) -> Contents:
        """What a commit would publish."""
        source: dict[str, Any] = {
            "run": self.folder.id,
            "stage": manifest.stage,
            "step": manifest.step,
            "commit": _name(manifest),
        }
        newest = self.catalogues.newest()
        return Contents.of_commit(commit, self.setup, newest.folders, newest.trie.version, source)

    def recommender(self, version: Version, device: str = "cpu") -> Recommender:
        """A version ready to be asked, its rows read where they lie. Raises CheckpointError where it does not fit the run."""
        corpus = self.catalogues.of(version.catalogue)
        if corpus is None:
            raise CheckpointError(
                f"version {version.number} is of catalogue {version.catalogue}, which {self.folder.id} does not have"
            )
        dense, counts = self.registry.files(version)
        rows = self.registry.rows(version.number, self.setup.specs())
        return model_of(dense, counts, rows, self.setup, corpus, device)

    def publish_newest(self) -> Version:
        """Publish the newest commit, unless it was; the version. The first of a run is full, the next are made from the one
        before. Raises StaleVersion where that was rolled back, ConfigError where there is no commit."""
        commit, manifest = self.newest_commit()
        versions = [self.registry.version(number) for number in self.registry.numbers()]
        for version in versions:
            if version.source.get("commit") == _name(manifest):
                return version
        line = [
            v.number
            for v in versions
            if v.source.get("step", 0) < manifest.step and not v.source.get("asked")
        ]
        base = line[-1] if line else None
        return self.registry.publish(self.contents(commit, manifest), base=base)

    def publish_commit(self, step: int) -> Version:
        """Publish the commit after a step, made from what is served; nobody is answered by it yet. Raises ConfigError."""
        commit, manifest = Checkpoints(self.folder.checkpoints).of(step)
        contents = self.contents(commit, manifest)
        contents.source["asked"] = True  # what the run commits later is not made from it
        return self.registry.publish(contents, base=self.registry.serving.default, serve=False)

    def publish_catalogue(self) -> None:
        """Publish what answers over the newest catalogue, unless that was published; nothing where no version answers."""
        newest, serving = self.catalogues.newest(), self.registry.serving
        if serving.default is None or newest is self.corpus:
            return
        counts = {} if self.setup.memory is None else counts_of(newest.folders)
        self.registry.renew(serving.default, newest.trie.version, counts)


def _name(manifest: Manifest) -> str:
    """The name of a commit, by which it is published once."""
    whole = manifest.files.get("dense/model.safetensors")
    shards = sorted(digest for name, digest in manifest.files.items() if name.startswith("dense/model-"))
    digest = whole or hashlib.sha256("".join(shards).encode()).hexdigest()
    return f"{digest[:16]}@{manifest.step}"
