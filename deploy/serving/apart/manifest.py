"""A KubeRay RayService of a run for `kubectl apply -f`. Source: https://docs.ray.io/en/latest/cluster/kubernetes."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import nonet
from nonet import yaml
from nonet.deploy.serving.access import READ_TOKEN, WRITE_TOKEN
from nonet.deploy.serving.service import DeploymentConfig, ServeConfig, ServicesConfig
from nonet.errors import ConfigError

_IMAGE = "YOUR-REGISTRY/nonet:{version}"


def write_manifest(path: Path, run: str, config: dict[str, Any], image: str | None = None) -> Path:
    """Write the manifest of a run that all pods see at the same path.

    Args:
        path: The file to write.
        run: The run's path in the pods.
        config: Keys of `ServeConfig`. Without `services`, each service is a deployment of one replica.
        image: The pods' image, by default a placeholder.

    Returns:
        The path of the file.

    Raises:
        ConfigError: A key is wrong, or a service needs a resource that manifests do not support.
    """
    settings = ServeConfig(**config)
    services = settings.services or ServicesConfig()
    if any(set(each.resources) - {"NPU"} for each in services.every):
        raise ConfigError(
            "a manifest supports cpus, gpus and the resource NPU; add other resources to its groups by hand"
        )
    body = yaml.dump(_build_service(run, config | {"services": services.model_dump()}, services, image))
    path.write_text(
        "# A Ray service on Kubernetes, by KubeRay. The image needs nonet[serve]; the volume has the run's folder.\n"
        + body
    )
    return path


def _build_service(
    run: str, config: dict[str, Any], services: ServicesConfig, image: str | None
) -> dict[str, Any]:
    """Build the RayService."""
    used = image or _IMAGE.format(version=nonet.__version__)
    application = {
        "name": "nonet",
        "import_path": "nonet.deploy.serving:build_app",
        "route_prefix": "/",
        "args": {"run": run, "config": config},
    }
    serve = {"http_options": {"host": "0.0.0.0", "port": 8000}, "applications": [application]}
    rest = [services.access, services.features]
    groups = [_build_group("access", rest, used), _build_group("engine", [services.engine], used)]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": "nonet"},
        "spec": {
            "serveConfigV2": yaml.dump(serve),
            "rayClusterConfig": {
                "rayVersion": version("ray"),
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": _build_pod("head", used, {"cpu": "1", "memory": "4Gi"}),
                },
                "workerGroupSpecs": groups,
            },
        },
    }


def _build_group(name: str, deployed: list[DeploymentConfig], image: str) -> dict[str, Any]:
    """Build a worker group with enough pods for the replicas of some deployments."""
    least = sum(each.least for each in deployed)
    most = sum(each.most for each in deployed)
    wanted = {"cpu": f"{max(each.cpus for each in deployed):g}", "memory": "8Gi"}
    if gpus := max(each.gpus for each in deployed):
        wanted["nvidia.com/gpu"] = f"{-(-gpus // 1):g}"
    if npus := max(each.resources.get("NPU", 0) for each in deployed):
        wanted["huawei.com/Ascend910"] = f"{-(-npus // 1):g}"
    return {
        "groupName": name,
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": most,
        "rayStartParams": {},
        "template": _build_pod(name, image, wanted),
    }


def _build_pod(name: str, image: str, resources: dict[str, str]) -> dict[str, Any]:
    """Build the template of a pod."""
    keys = {WRITE_TOKEN: "token", READ_TOKEN: "read-token"}
    tokens = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": "nonet", "key": key, "optional": True}}}
        for name, key in keys.items()
    ]
    return {
        "spec": {
            "containers": [
                {
                    "name": f"ray-{name}",
                    "image": image,
                    "resources": {"requests": dict(resources), "limits": dict(resources)},
                    "env": tokens,
                    "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
                }
            ],
            "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": "nonet-runs"}}],
        }
    }
