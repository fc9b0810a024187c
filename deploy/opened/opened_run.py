"""A finished run as commands read it: its artifacts, how its model is built, and its registry of versions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nonet.controller.record import Checkpoints, Manifest, RunFolder, find_run
from nonet.controller.scenario import Scenario, check_supported, load_scenario
from nonet.deploy.opened.artifacts import check_selected, find_artifacts
from nonet.deploy.opened.catalogues import CatalogueVersions
from nonet.deploy.opened.vocabulary import Vocabulary
from nonet.errors import CheckpointError, ConfigError
from nonet.models.generation import Corpus, Recommender, list_memory_files
from nonet.models.inference import ClickEngine, InferenceEngine, PrefixStates
from nonet.plugins import load_heavy
from nonet.samples.stores import Join
from nonet.samples.tables import IdKind
from nonet.samples.tokenised import StoredSequences, UserEvents
from nonet.workers import check_base, check_base_sha256, read_base
from nonet.workers.registry import (
    Version,
    VersionContents,
    VersionRegistry,
    load_recommender,
    open_registry,
)
from nonet.workers.roles import RunSetup


@dataclass(frozen=True)
class OpenedRun:
    """A run that has tokenised its data.

    Attributes:
        folder: The run's folder.
        scenario: The run's scenario.
        folders: Folders of the run's artifacts by kind.
        beside: The folder of the run's versions and posted events.
        address: The address of the run's versions, such as s3://bucket/folder; None for the address that was
            used last, or `beside` if there is none.
    """

    folder: RunFolder
    scenario: Scenario
    folders: dict[str, str]
    beside: Path
    address: str | None = None

    @classmethod
    def open(
        cls,
        run: str | Path,
        beside: Path | None = None,
        *,
        address: str | None = None,
        verb: str = "recommend",
    ) -> OpenedRun:
        """Open a run for a verb.

        Args:
            run: The run's folder, its id, a prefix of its id, or `last`.
            beside: The folder of the run's versions and posted events, by default RUN/serving.
            address: The address of the run's versions; None as for the attribute.
            verb: The verb, one of `nonet.verbs.VERBS`.

        Raises:
            ConfigError: The run does not exist, has not tokenised its data, or does not have the verb.
        """
        folder = find_run(run)
        scenario, _ = load_scenario(folder.scenario)
        check_supported(scenario, verb, folder.id)
        folders = find_artifacts(folder)
        return cls(folder, scenario, folders, beside or folder.path / "serving", address)

    @property
    def scenes(self) -> tuple[str, ...]:
        """The names of the scenes of the run's RL stages."""
        setups = (stage.kind.make_scenes(stage) for stage in self.scenario.stages.values())
        return tuple(dict.fromkeys(name for setup in setups if setup is not None for name in setup.names))

    @cached_property
    def setup(self) -> RunSetup:
        """The settings with which the model is built and votes are counted."""
        from nonet.controller.setup import make_run_setup  # imports Ray, which exports do not need

        return make_run_setup(self.scenario)

    @cached_property
    def corpus(self) -> Corpus:
        """The items, trie and users' events that the run was trained with, without joined columns (`RequestFeatures`)."""
        return Corpus.load(self.folders)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """How the users of the run name things: ids, times and columns."""
        data, facts = self.scenario.data, self.folder.read_facts()
        # Runs of earlier versions have no unit.
        unit = facts["data"].get("time_unit") if facts is not None else None
        users, items = (IdKind.from_ids(ids) for ids in (self.corpus.seq.user_id, self.corpus.item_id))
        return Vocabulary(users, items, unit or "s", dict(data.columns), data.table_format.missing)

    def replace_stores(self, stores: Mapping[str, Mapping[str, Any]]) -> dict[str, Join]:
        """Return the joins of the run by name, with other stores.

        Args:
            stores: The address (`use`) and `options` of stores by the name of their join, either of which may be missing.

        Raises:
            ConfigError: There is no such join.
        """
        joins = dict(self.setup.joins)
        for name, store in stores.items():
            if name not in joins:
                raise ConfigError(
                    f"join.{name}: {self.folder.id} has no join {name!r}; its joins: {', '.join(joins) or 'none'}"
                )
            join = joins[name]
            changes = {
                "use": store.get("use") or join.use,
                "options": {**join.options, **store.get("options", {})},
            }
            joins[name] = Join.model_validate(join.model_dump() | changes)
        return joins

    @cached_property
    def catalogues(self) -> CatalogueVersions:
        """The versions of the catalogue."""
        return CatalogueVersions(self.folder, self.folders, self.corpus)

    @cached_property
    def events(self) -> UserEvents | None:
        """The store of users' events that the scenario names (`data.sequences`), including appended events."""
        stored = self.setup.stored
        return None if stored is None else stored.open_events(self.folders, self.corpus.seq)

    def open_events(self, store: str) -> UserEvents:
        """Write the users' events to the store at an address unless they are there, and return them."""
        stored = StoredSequences.model_construct(use=store)  # opening it checks the address
        stored.write(self.corpus.seq, self.folders)
        return stored.open_events(self.folders, self.corpus.seq)

    @cached_property
    def registry(self) -> VersionRegistry:
        """The registry of published versions. Raises ConfigError as `open_registry`."""
        return open_registry(self.beside, self.address, self.folder.describe_owner())

    def find_newest_commit(self, *, mid_stage: bool = False) -> tuple[Path, Manifest]:
        """Return the newest checkpoint that a stage selected.

        Args:
            mid_stage: Whether checkpoints from the middle of a stage count too.

        Returns:
            The checkpoint's folder and its manifest.

        Raises:
            ConfigError: There is none.
        """
        checkpoints = Checkpoints(self.folder.checkpoints)
        newest = checkpoints.find_newest() if mid_stage else checkpoints.find_newest_stage_end()
        if newest is None:
            check_selected(self.folder)
            raise ConfigError(f"{self.folder.id} has no checkpoint yet: there is no model to serve")
        return newest

    @property
    def withdrawn(self) -> tuple[str, ...]:
        """The ids of the items that must not be shown: those that a server hides, and those that the newest catalogue lacks."""
        hidden = self.registry.serving.withdrawn if self.beside.is_dir() or self.address else ()
        if not self.scenario.model.spec.makes_lists:
            return hidden
        newest = self.catalogues.get_newest()
        removed = newest.item_id[np.asarray(newest.trie.leaf_of_item) < 0]
        return tuple(dict.fromkeys([*hidden, *map(str, removed.tolist())]))

    @property
    def has_version(self) -> bool:
        """Whether a version receives traffic."""
        return self.registry.serving.default is not None

    @property
    def has_ended_stage(self) -> bool:
        """Whether a stage has ended and selected a checkpoint."""
        return Checkpoints(self.folder.checkpoints).find_newest_stage_end() is not None

    def build_contents(self, checkpoint: Path, manifest: Manifest) -> VersionContents:
        """Return the contents with which a checkpoint is published: its files, the newest catalogue, and its origin.

        Args:
            checkpoint: The checkpoint's folder.
            manifest: The checkpoint's manifest.
        """
        source: dict[str, Any] = {
            "run": self.folder.id,
            "stage": manifest.stage,
            "step": manifest.step,
            "commit": _make_checkpoint_name(manifest),
        }
        if (base := read_base(checkpoint / "dense")) is not None:
            source["base"] = base
        newest = self.catalogues.get_newest()
        contents = VersionContents.from_commit(
            checkpoint, self.setup, newest.folders, newest.trie.version, source
        )
        files = self.scenario.model.spec.version_files
        return replace(
            contents,
            counts={**contents.counts, **{name: checkpoint / file for name, file in files.items()}},
        )

    def load_recommender(self, version: Version, device: str = "cpu") -> Recommender:
        """Load the recommender of a version, with memory-mapped sparse rows.

        Args:
            version: The version to load.
            device: The device that computes the model.

        Raises:
            CheckpointError: The run does not have the version's catalogue or its base model.
        """
        corpus = self.catalogues.get_corpus(version.catalogue)
        if corpus is None:
            raise CheckpointError(
                f"version {version.number} is of catalogue {version.catalogue}, which {self.folder.id} does not have"
            )
        dense, counts = self.registry.locate_files(version)
        rows = self.registry.open_rows(version.number, self.setup.make_table_specs())
        recommender = load_recommender(dense, counts, rows, self.setup, corpus, device)
        label = f"version {version.number} of {self.folder.id}"
        check_base(recommender.model, version.source.get("base"), label)
        return recommender

    def load_engine(
        self, version: Version, device: str = "cpu", states: PrefixStates | None = None
    ) -> InferenceEngine | ClickEngine:
        """Load the engine that answers questions by a version.

        Args:
            version: The version to load.
            device: The device that computes the model.
            states: Cache of users' states between questions; None for none.

        Raises:
            CheckpointError: The run does not have the version's catalogue or its base model.
        """
        engine_class = self.scenario.model.spec.engine
        if not engine_class:
            return InferenceEngine(self.load_recommender(version, device), version.number, states)
        dense, files = self.registry.locate_files(version)
        rows = self.registry.open_rows(version.number, self.setup.make_table_specs())
        return load_heavy(engine_class)(dense, files, rows, version.number)

    def publish_newest(self, *, mid_stage: bool = False) -> Version:
        """Publish and serve the newest checkpoint that a stage selected, unless it was published before.

        The first version of a run is complete. Later ones are stored as changes to their base: the version of
        the checkpoint that was followed last, else the newest version of an earlier step.

        Args:
            mid_stage: Whether checkpoints from the middle of a stage count too.

        Returns:
            The version of the checkpoint.

        Raises:
            StaleVersion: The base was rolled back.
            ConfigError: There is no such checkpoint.
        """
        checkpoint, manifest = self.find_newest_commit(mid_stage=mid_stage)
        versions = self.registry.list_readable()
        name = _make_checkpoint_name(manifest)
        serving = self.registry.serving
        followed_name = serving.followed
        published = [version for version in versions if version.source.get("commit") == name]
        if published and followed_name == name:
            return published[-1]
        earlier = [
            version
            for version in versions
            if version.source.get("step", 0) < manifest.step and not version.source.get("asked")
        ]
        followed = [
            version for version in earlier if followed_name and version.source.get("commit") == followed_name
        ]
        # Of one checkpoint there may be versions with several catalogues, of which one may have been rolled back alone.
        followed_now = [version for version in followed if version.number not in serving.refused]
        base = (followed_now or followed or earlier or [None])[-1]
        contents = self.build_contents(checkpoint, manifest)
        return self.registry.publish(contents, base=base.number if base else None)

    def publish_checkpoint(self, step: int) -> Version:
        """Publish a checkpoint as changes to the served version, without directing traffic to it.

        Args:
            step: The checkpoint's step.

        Returns:
            The new version.

        Raises:
            ConfigError: The checkpoint does not exist, or `model.path` has another base model than its
                weights need.
        """
        checkpoint, manifest = Checkpoints(self.folder.checkpoints).find_at_step(step)
        self._check_base_folder(checkpoint, manifest.step)
        contents = self.build_contents(checkpoint, manifest)
        contents.source["asked"] = True  # `publish_newest` bases no later version on it
        return self.registry.publish(contents, base=self.registry.serving.default, serve=False)

    def _check_base_folder(self, checkpoint: Path, step: int) -> None:
        """Raise ConfigError if the base model in `model.path` is not the one that a checkpoint's weights need."""
        needed_base = read_base(checkpoint / "dense")
        if needed_base is None:
            return
        model = self.scenario.model
        try:
            check_base_sha256(
                model.spec.hash_base(model.get_options()),
                needed_base,
                f"{self.folder.id}, step {step}, is not published",
            )
        except CheckpointError as error:
            raise ConfigError(str(error)) from None

    def publish_catalogue(self) -> None:
        """Serve every version that receives traffic with the newest catalogue; it is published unless there is such a version.

        Raises:
            CheckpointError: A version has a catalogue that the run does not have, so it is not known which one is newer.
        """
        newest = self.catalogues.get_newest()
        served = [
            version for number in self.registry.serving.versions if (version := self._read_served(number))
        ]
        if all(version.catalogue == newest.trie.version for version in served):
            return
        for version in served:
            if version.catalogue not in self.catalogues:
                raise CheckpointError(
                    f"version {version.number} is of catalogue {version.catalogue}, which {self.folder.id} does not have; put "
                    "its catalogues.json back from a copy, or promote a version of a catalogue that it has"
                )
        counts = {} if self.setup.memory is None else list_memory_files(Path(newest.folders["transitions"]))
        self.registry.renew_served(newest.trie.version, counts)

    def _read_served(self, number: int) -> Version | None:
        """Read the manifest of a version that receives traffic, None if it is damaged: its engine reports that."""
        try:
            return self.registry.read_version(number)
        except CheckpointError:
            return None


def _make_checkpoint_name(manifest: Manifest) -> str:
    """Return a name of a checkpoint by its weights and step, by which it is recognized when it was published."""
    file_digest = manifest.files.get("dense/model.safetensors")
    shard_digests = sorted(
        digest for name, digest in manifest.files.items() if name.startswith("dense/model-")
    )
    digest = file_digest or hashlib.sha256("".join(shard_digests).encode()).hexdigest()
    return f"{digest[:16]}@{manifest.step}"
