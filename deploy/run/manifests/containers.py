"""Container files for the devices of a scenario, and a compose file for two nodes with Redis and HBase."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

from nonet import yaml
from nonet.controller.scenario import to_document
from nonet.deploy.run.manifests.request import ManifestRequest
from nonet.errors import ConfigError
from nonet.workers.devices import HOST

# By device: the image to begin with, and the command that installs torch.
_BASES = {
    HOST: ("python:{python}-slim", "torch=={torch} --index-url https://download.pytorch.org/whl/cpu"),
    "cuda": ("nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04", "torch=={torch}"),
    "npu": ("quay.io/ascend/cann:8.3.rc1-910b-ubuntu22.04-py3.11", "torch=={torch} torch_npu=={torch}"),
}
# By text in a scenario: the extra of nonet that it needs.
_EXTRAS = {
    "s3://": "storage",
    "hbase://": "hbase",
    "redis://": "stores",
    "lmdb://": "stores",
    "use: hf": "hf",
    "use: deepspeed": "deepspeed",
    "use: mlflow": "mlflow",
    "use: wandb": "wandb",
}

_CONTAINER = """\
# Image of the nodes with device {device}. In a clone of Nonet: docker build -f Containerfile.{device} -t {image} .
FROM {base}
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1
RUN apt-get update \\
 && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-pip python-is-python3 wget \\
 && rm -rf /var/lib/apt/lists/*
RUN python -m pip install {torch}
COPY . /opt/nonet
RUN python -m pip install "/opt/nonet{extras}" "ray[default,data]=={ray}"
ENV NONET_CACHE=/cache NONET_RUNS=/runs
WORKDIR /tmp
"""


def build_container_files(request: ManifestRequest) -> dict[str, str]:
    """Build a container file for each kind of device of the scenario's pools.

    Raises:
        ConfigError: There is no known image for a device.
    """
    text = yaml.dump(to_document(request.scenario))
    extras = sorted({extra for word, extra in _EXTRAS.items() if word in text})
    files = {}
    for device in dict.fromkeys(group.device.name for group in request.groups):
        if device not in _BASES:
            raise ConfigError(
                f"--form containers: there is no known image for device {device}; known: {', '.join(_BASES)}"
            )
        base, torch = _BASES[device]
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        torch_version = version("torch").partition("+")[0]
        files[f"Containerfile.{device}"] = _CONTAINER.format(
            device=device,
            image=request.make_image(device),
            base=base.format(python=python),
            torch=torch.format(torch=torch_version),
            extras=f"[{','.join(extras)}]" if extras else "",
            ray=version("ray"),
        )
    return files


def build_compose_files(request: ManifestRequest) -> dict[str, str]:
    """Build compose.yaml: a Ray cluster of two nodes, Redis, HBase, and a container that submits the scenario."""
    image = request.make_image(HOST)
    node: dict[str, Any] = {
        "image": image,
        "environment": {
            "NONET_RUNS": "/runs",
            "NONET_CACHE": "/cache",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "${RAY_AUTH_TOKEN:?is not set; export RAY_AUTH_TOKEN=$(openssl rand -hex 32)}",
        },
        "env_file": [{"path": "nonet.env", "required": False}],
        "volumes": ["runs:/runs"],
        "shm_size": "2gb",
    }
    start = "--disable-usage-stats --block"
    is_healthy = ["CMD", "ray", "health-check", "--address", "head:6379"]
    changes = [word for change in request.changes for word in ("--set", change)]
    submit = ["nonet", "submit", f"/scenario/{request.path.name}", "--address", "http://head:8265"]
    services = {
        "redis": {"image": "redis:7", "volumes": ["redis:/data"]},
        "hbase": {"image": "harisekhon/hbase:2.1", "ports": ["9090"]},
        "head": {
            **node,
            "command": f"ray start --head --port=6379 --dashboard-host=0.0.0.0 {start}",
            "ports": ["127.0.0.1:8265:8265"],
            "healthcheck": {"test": is_healthy, "interval": "5s", "timeout": "5s", "retries": 24},
        },
        "worker": {
            **node,
            "command": f"ray start --address=head:6379 {start}",
            "depends_on": {"head": {"condition": "service_healthy"}},
        },
        "run": {
            **node,
            "command": [*submit, "--name", request.name, *changes],
            "depends_on": {
                name: {"condition": "service_healthy" if name == "head" else "service_started"}
                for name in ("head", "worker", "redis", "hbase")
            },
            "volumes": ["runs:/runs", f"{request.path.parent.absolute()}:/scenario:ro"],
        },
    }
    comment = (
        "# Two Ray nodes with Redis (redis://redis:6379) and HBase (hbase://hbase:9090): docker compose up.\n"
        "# Stores in the scenario are named by these addresses; nonet.env has its variables.\n"
    )
    return {"compose.yaml": comment + yaml.dump({"services": services, "volumes": {"runs": {}, "redis": {}}})}
