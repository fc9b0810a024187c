"""Container files for the devices of a scenario, and a compose file for two nodes with Redis and HBase."""

from __future__ import annotations

import sys
from importlib.metadata import version

from nonet import yaml
from nonet.controller.scenario import to_document
from nonet.deploy.run.manifests.request import ManifestRequest, fill_template
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
        files[f"Containerfile.{device}"] = fill_template(
            "Containerfile",
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
    compose = yaml.parse(fill_template("compose.yaml"))
    for name in ("head", "worker", "run"):
        compose["services"][name]["image"] = request.make_image(HOST)
    changes = [word for change in request.changes for word in ("--set", change)]
    submit = ["nonet", "submit", f"/scenario/{request.path.name}", "--address", "http://head:8265"]
    run = compose["services"]["run"]
    run["command"] = [*submit, "--name", request.name, *changes]
    run["volumes"].append(f"{request.path.parent.absolute()}:/scenario:ro")
    comment = (
        "# Two Ray nodes with Redis (redis://redis:6379) and HBase (hbase://hbase:9090): docker compose up.\n"
        "# Stores in the scenario are named by these addresses; nonet.env has its variables.\n"
    )
    return {"compose.yaml": comment + yaml.dump({key: compose[key] for key in ("services", "volumes")})}
