"""The interface of exporters, which read a version of a run (`VersionToExport`) and write a folder."""

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

    from nonet.deploy.serving.features import ServedRun
    from nonet.models.generation import Corpus
    from nonet.workers.registry import Version


@dataclass(frozen=True, slots=True)
class VersionToExport:
    """The input of an exporter: a published version of a run.

    Attributes:
        run: The run, with its folder, scenario, setup and registry.
        version: The number of the version.
        published: The manifest of the version in the registry.
        corpus: Items, semantic ids and sequences of the version's catalogue.
        dense: File of the dense weights (safetensors).
        counts: Files of the transition counts, by array name.
    """

    run: ServedRun
    version: int
    published: Version
    corpus: Corpus
    dense: Path
    counts: Mapping[str, Path]

    @classmethod
    def open(cls, run: str, version: int | None = None) -> VersionToExport:
        """Open a version of a run, by default the one that is served, else the newest checkpoint.

        Raises:
            ConfigError: The run has no catalogue of this version.
        """
        from nonet.deploy.serving.features import ServedRun

        opened = ServedRun.open(run)
        opened.check_servable("export")
        number = version or opened.registry.serving.default or opened.publish_newest().number
        published = opened.registry.read_version(number)
        dense, counts = opened.registry.locate_files(published)
        corpus = opened.catalogues.get_corpus(published.catalogue)
        if corpus is None:
            raise ConfigError(
                f"version {number} is of catalogue {published.catalogue}, which {opened.folder.id} does not have"
            )
        return cls(opened, number, published, corpus, dense, counts)

    def build_model(self) -> Module:
        """Return the module with the weights of the version."""
        from nonet.models import build_model
        from nonet.workers import load_weights

        setup = self.run.setup
        model = build_model(setup.model, self.run.corpus.codes, setup.get_feature_dims(), setup.seed)
        load_weights(model, self.dense)
        return model

    def merge_rows(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the sparse rows of the version: by table, arrays by name."""
        from nonet.embedding.reading import merge_layers

        layers = self.run.registry.map_layers(self.version)
        return {table: merge_layers(parts).to_arrays() for table, parts in layers.items()}


@dataclass(frozen=True)
class Exporter:
    """A kind of exporter, which writes a published version.

    Attributes:
        write: A function (version, folder) that writes into a new, empty folder, or its dotted path.
    """

    write: str | Callable[[VersionToExport, Path], None]


def _write_folder(version: Any, folder: Any) -> None:
    """Declare the arguments of `Exporter.write`."""


EXPORTERS = PluginRegistry(
    "exporter", Exporter, "nonet.deploy.serving.offline.exporters", contract={"write": _write_folder}
)
