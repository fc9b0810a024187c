"""ManifestRequest: the scenario for which files are written, with what the command line says about the cluster."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import nonet
from nonet.controller.scenario import Scenario
from nonet.deploy.run.jobs import write_package
from nonet.deploy.run.manifests.node_groups import NodeGroup, list_node_groups
from nonet.errors import ConfigError

_MAX_NAME_LENGTH = 40  # KubeRay adds to the names of the pods


def fill_template(file: str, /, **values: object) -> str:
    """Return the text of a file of `templates` in which each value stands for its name between @ signs."""
    text = (Path(__file__).parent / "templates" / file).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", str(value))
    return text


@dataclass(frozen=True)
class ManifestRequest:
    """A scenario and the cluster that it is to run on.

    Attributes:
        scenario: The scenario.
        path: The scenario's file.
        changes: Changes of the scenario, each `a.b=c`.
        image: The image of the containers; "" for a placeholder per device.
        queue: The queue or partition; "" for none.
    """

    scenario: Scenario
    path: Path
    changes: Sequence[str] = ()
    image: str = ""
    queue: str = ""

    @property
    def name(self) -> str:
        """The scenario's name as one of Kubernetes' names."""
        name = re.sub(r"[^a-z0-9]+", "-", self.scenario.name.lower()).strip("-")
        return name[:_MAX_NAME_LENGTH].strip("-") or "nonet"

    @cached_property
    def groups(self) -> list[NodeGroup]:
        """The groups of nodes that the scenario needs."""
        return list_node_groups(self.scenario)

    @property
    def is_stored(self) -> bool:
        """Whether the run is kept in object storage."""
        return self.scenario.storage is not None

    def make_image(self, device: str) -> str:
        """Return the image of the nodes of a device."""
        return self.image or f"YOUR-REGISTRY/nonet:{nonet.__version__}-{device}"

    def read_package(self) -> bytes:
        """Return the zip archive with the scenario and its files, as `nonet submit` sends it.

        Raises:
            ConfigError: A file is outside of the scenario's folder, or the package is too large.
        """
        with tempfile.TemporaryDirectory(prefix="nonet-manifest-") as folder:
            package = Path(folder) / "package.zip"
            write_package(package, self.scenario, self.path, list(self.changes), [], nonet.__version__)
            return package.read_bytes()

    def find_accelerator(self) -> NodeGroup | None:
        """Return the only group of nodes with devices, or None without one.

        Raises:
            ConfigError: There are groups with different devices.
        """
        groups = [group for group in self.groups if group.devices]
        kinds = {group.device.name for group in groups}
        if len(kinds) > 1:
            raise ConfigError(
                f"--form slurm: the scenario has pools of {' and '.join(sorted(kinds))}, and a Slurm job of equal nodes has one "
                "kind; use --form kuberay, or run nonet submit on a cluster that has both"
            )
        return max(groups, key=lambda group: group.devices, default=None)
