"""The interface of exporters, which write a version of a run (`VersionToExport`) into a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonet.errors import ConfigError
from nonet.plugins import PluginRegistry

if TYPE_CHECKING:
    import numpy as np
    from torch.nn import Module

    from nonet.deploy.opened import OpenedRun
    from nonet.models.generation import Corpus
    from nonet.workers.registry import Version


@dataclass(frozen=True, slots=True)
class VersionToExport:
    """The input of an exporter: a published version of a run.

    Attributes:
        run: The run, with its folder, scenario, setup and registry.
        version: The number of the version.
        published: The registry's manifest of the version.
        corpus: Items, semantic ids and sequences of the version's catalogue.
        dense: File of the dense weights (safetensors).
        counts: Files of the transition counts, by array name.
    """

    run: OpenedRun
    version: int
    published: Version
    corpus: Corpus
    dense: Path
    counts: Mapping[str, Path]

    @classmethod
    def open(cls, run: str, version: int | None = None) -> VersionToExport:
        """Open a version of a run.

        Args:
            run: The run's folder, its id, a prefix of its id, or `last`.
            version: The version's number; None for the served one, or else the newest checkpoint, which is published.

        Raises:
            ConfigError: The run does not have the catalogue of this version.
        """
        from nonet.deploy.opened import OpenedRun

        served_run = OpenedRun.open(run, verb="export")
        number = version or served_run.registry.serving.default or served_run.publish_newest().number
        published = served_run.registry.read_version(number)
        dense, counts = served_run.registry.locate_files(published)
        corpus = served_run.catalogues.get_corpus(published.catalogue)
        if corpus is None:
            raise ConfigError(
                f"version {number} is of catalogue {published.catalogue}, which {served_run.folder.id} does not have"
            )
        return cls(served_run, number, published, corpus, dense, counts)

    def build_model(self) -> Module:
        """Return the module with the weights of the version."""
        from nonet.models import build_model
        from nonet.workers import load_weights

        setup = self.run.setup
        model = build_model(setup.model, self.run.corpus.codes, setup.get_feature_dims(), setup.seed)
        load_weights(model, self.dense)
        return model

    def merge_rows(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the sparse rows of the version as arrays by table and name."""
        from nonet.embedding.reading import merge_layers

        layers_by_table = self.run.registry.map_layers(self.version)
        return {table: merge_layers(layers).to_arrays() for table, layers in layers_by_table.items()}


@dataclass(frozen=True)
class Exporter:
    """A form in which published versions are exported.

    Attributes:
        write: A function (version, folder) that writes a `VersionToExport` into a new, empty folder, or the
            function's address as `package.module:name`.
    """

    write: str | Callable[[VersionToExport, Path], None]


def _write_folder(version: Any, folder: Any) -> None:
    """Declare the arguments of `Exporter.write`, with which the registry compares those of plug-ins."""


EXPORTERS = PluginRegistry(
    "exporter", Exporter, "nonet.deploy.serving.offline.exporters", contract={"write": _write_folder}
)
