"""Environments of pools: the interpreter or image that a pool's workers start in, and their variables.

A pool brings its own: CUDA hosts are x86-64 with torch+cuda, Ascend hosts often aarch64 with torch_npu. Ray starts the
worker (`py_executable`, `image_uri`, `pip`, `env_vars`); nonet's own sources travel as a package, so both sides always run
the same code. What Ray cannot say in time is asked before: `check_interpreter` looks on every node, in about 3 s
per pool, whether the interpreter is there and has the same Python and Ray; without that an actor with a wrong one waits for ever.
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

_EXCLUDED = ["**/__pycache__", "**/*.so"]  # a native part is built where it runs
_LOOK = (
    "import json, sys, ray; "
    "print(json.dumps({'python': '.'.join(map(str, sys.version_info[:2])), 'ray': ray.__version__}))"
)


@dataclass(frozen=True, slots=True)
class PoolEnvironment:
    """One of an interpreter's path, an image or a list of requirements, or none of them; and variables."""

    python: str = ""
    image: str = ""
    pip: tuple[str, ...] = ()
    vars: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = [name for name in ("python", "image", "pip") if getattr(self, name)]
        if len(named) > 1:
            raise ConfigError(f"env has {' and '.join(named)}; a pool's workers start in one of them")

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> PoolEnvironment:
        """From a scenario's `env:`; None is the environment Ray itself runs in."""
        known: dict[str, Any] = {key: value for key, value in (options or {}).items() if value}
        known["pip"] = tuple(known.get("pip", ()))
        return cls(**known)

    def to_runtime_env(self, device: Device) -> dict[str, Any]:
        """What Ray is told for an actor on this device; {} when there is nothing to tell.

        An image must hold nonet itself: Ray mixes images with nothing but variables.
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
        """Look for the interpreter on every node (Ray's ids), `timeout_s` long at most.

        Raises PlacementError that names pool, node and lack.
        """
        if not self.python:
            return
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ids = sorted(set(nodes))
        look = ray.remote(num_cpus=0, max_retries=0)(probe_interpreter)
        checks = [
            look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                self.python, dict(self.vars), timeout_s
            )
            for node in ids
        ]
        versions = {"python": ".".join(map(str, sys.version_info[:2])), "ray": ray.__version__}
        try:
            looked = ray.get(checks, timeout=timeout_s)
        except RayError as error:
            raise PlacementError(
                f"pool {pool!r}: nobody could look for env.python {self.python} on its nodes within "
                f"{timeout_s:g} s: {error}{suggest_longer_deadline(timeout_s)}"
            ) from None
        for node, interpreter in zip(ids, looked, strict=True):
            problem = interpreter.get("error") or ", ".join(
                f"{what} is {interpreter[what]}, the cluster's is {version}"
                for what, version in versions.items()
                if interpreter[what] != version
            )
            if problem:
                raise PlacementError(
                    f"pool {pool!r}: env.python {self.python} on node {node[:8]}: {problem}. "
                    "Put an interpreter there with the same Python and Ray, or change pools."
                    f"{pool}.env"
                )


def probe_interpreter(python: str, variables: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """{"python", "ray"}: the versions of an interpreter on this machine, or {"error": why it has none to tell}."""
    if not os.access(python, os.X_OK):
        return {"error": "there is no such executable"}
    try:
        process = subprocess.run(
            [python, "-c", _LOOK],
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
    """The URI under which this cluster keeps nonet's sources; put there by the first who asks (0.3 s)."""
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
