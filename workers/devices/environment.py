"""Environments of pools: the interpreter or image that a pool's workers start in, and their variables.

A pool has an environment of its own: CUDA hosts are x86-64 with torch+cuda, Ascend hosts often aarch64 with
torch_npu. Ray starts the worker (`py_executable`, `image_uri`, `pip`, `env_vars`). The sources of nonet are sent as a
package, so all processes run the same code. Ray does not report a wrong interpreter: its actor would stay pending
forever. So `check_interpreter` verifies on every node, in about 3 s for each pool, that the interpreter exists
and has the same versions of Python and Ray.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nonet.deadlines import DEFAULTS, suggest_longer_deadline
from nonet.errors import ConfigError, PlacementError
from nonet.workers.devices.vendors import Device

_EXCLUDED = ["**/__pycache__", "**/*.so"]  # Native code is built on the machine where it runs.
_VERSION_SCRIPT = (  # Prints the versions of Python (major.minor) and Ray as JSON.
    "import json, sys, ray; "
    "print(json.dumps({'python': '.'.join(map(str, sys.version_info[:2])), 'ray': ray.__version__}))"
)


@dataclass(frozen=True, slots=True)
class PoolEnvironment:
    """The environment of a pool. At most one of `python`, `image` and `pip` may be set; `vars` combines with each.

    Attributes:
        python: Path of an interpreter.
        image: URI of a container image.
        pip: Requirements to install.
        vars: Environment variables.
    """

    python: str = ""
    image: str = ""
    pip: tuple[str, ...] = ()
    vars: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        set_fields = [name for name in ("python", "image", "pip") if getattr(self, name)]
        if len(set_fields) > 1:
            raise ConfigError(f"env has {' and '.join(set_fields)}; they exclude each other, so set only one")

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> PoolEnvironment:
        """Make an environment from the `env:` of a scenario; None means the environment that Ray itself runs in."""
        fields: dict[str, Any] = {key: value for key, value in (options or {}).items() if value}
        fields["pip"] = tuple(fields.get("pip", ()))
        return cls(**fields)

    def to_runtime_env(self, device: Device) -> dict[str, Any]:
        """Return Ray's `runtime_env` for an actor on this device, {} if nothing has to be set.

        An image must contain nonet itself, since Ray accepts only variables beside an image.
        """
        runtime_env: dict[str, Any] = {}
        if self.python:
            runtime_env = {"py_executable": shlex.quote(self.python), "py_modules": [_upload_sources()]}
        elif self.image:
            runtime_env = {"image_uri": self.image}
        elif self.pip:
            runtime_env = {"pip": list(self.pip)}
        variables = dict(device.vars) | {key: str(value) for key, value in self.vars.items()}
        return runtime_env | ({"env_vars": variables} if variables else {})

    def check_interpreter(self, pool: str, nodes: Iterable[str], timeout_s: float = DEFAULTS.start) -> None:
        """Check that the interpreter exists on every node and has the same versions of Python and Ray as this process.

        Args:
            pool: Name of the pool, for messages.
            nodes: Ray's ids of the nodes.
            timeout_s: Maximum seconds to wait for all nodes.

        Raises:
            PlacementError: The interpreter does not exist, cannot be run or has other versions.
        """
        if not self.python:
            return
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node_ids = sorted(set(nodes))
        remote_probe = ray.remote(num_cpus=0, max_retries=0)(probe_interpreter)
        refs = [
            remote_probe.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
            ).remote(self.python, dict(self.vars), timeout_s)
            for node_id in node_ids
        ]
        own_versions = {"python": ".".join(map(str, sys.version_info[:2])), "ray": ray.__version__}
        try:
            probe_results = ray.get(refs, timeout=timeout_s)
        except RayError as error:
            raise PlacementError(
                f"pool {pool!r}: env.python {self.python} could not be checked on its nodes within "
                f"{timeout_s:g} s: {error}{suggest_longer_deadline(timeout_s)}"
            ) from None
        for node_id, result in zip(node_ids, probe_results, strict=True):
            problem = result.get("error") or ", ".join(
                f"{name} is {result[name]}, the cluster's is {version}"
                for name, version in own_versions.items()
                if result[name] != version
            )
            if problem:
                raise PlacementError(
                    f"pool {pool!r}: env.python {self.python} on node {node_id[:8]}: {problem}. "
                    "Put an interpreter there with the same Python and Ray, or change pools."
                    f"{pool}.env"
                )


def probe_interpreter(python: str, variables: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """Read the versions of an interpreter on this machine.

    Args:
        python: Path of the interpreter.
        variables: Environment variables to set.
        timeout_s: Maximum seconds that the interpreter may run.

    Returns:
        {"python", "ray"}: its versions, or {"error": why they could not be read}.
    """
    if not os.access(python, os.X_OK):
        return {"error": "there is no such executable"}
    try:
        process = subprocess.run(
            [python, "-c", _VERSION_SCRIPT],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **variables},
        )
        return json.loads(process.stdout)
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": str(error)}
    except json.JSONDecodeError:
        return {"error": (process.stderr.strip().splitlines() or ["it printed nothing"])[-1]}


def _upload_sources() -> str:
    """Return the URI of nonet's sources in this cluster; the first call uploads them (0.3 s)."""
    from ray._private.runtime_env import packaging

    import nonet

    folder = str(Path(nonet.__file__).parent)
    uri = packaging.get_uri_for_directory(folder, include_gitignore=False, excludes=_EXCLUDED)
    packaging.upload_package_if_needed(
        uri,
        tempfile.gettempdir(),
        folder,
        include_gitignore=False,
        include_parent_dir=True,
        excludes=_EXCLUDED,
    )
    return uri
