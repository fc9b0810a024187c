"""A manifest that serves a run on Kubernetes by KubeRay's RayService. See https://docs.ray.io/en/latest/cluster/kubernetes."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import nonet
from nonet import yaml
from nonet.deploy.run.manifests import DASHBOARD_PORT, METRICS_PORT, build_network_policy, fill_template
from nonet.deploy.serving.access import READ_TOKEN, WRITE_TOKEN
from nonet.deploy.serving.service import DeploymentConfig, ServeConfig, ServicesConfig
from nonet.errors import ConfigError

_HTTP_PORT = 8000
_IMAGE = "YOUR-REGISTRY/nonet:{version}"


def write_manifest(path: Path, run: str, config: dict[str, Any], image: str | None = None) -> Path:
    """Write the manifest with which `kubectl apply -f` serves a run.

    Args:
        path: The file to write.
        run: The run's path, which is the same in all pods.
        config: Keys of `ServeConfig`. Without `services`, each service is a deployment of one replica.
        image: The pods' image, by default a placeholder.

    Returns:
        The path of the file.

    Raises:
        ConfigError: A key is wrong, or a service needs a resource that manifests do not support.
    """
    settings = ServeConfig(**config)
    services = settings.services or ServicesConfig()
    if any(set(service.resources) - {"NPU"} for service in services.every):
        raise ConfigError(
            "a manifest supports cpus, gpus and the resource NPU; add other resources to its groups by hand"
        )
    ray_service = _build_ray_service(run, config | {"services": services.model_dump()}, services, image)
    labels = _read_template()["pod"]["metadata"]["labels"]
    policy = build_network_policy("nonet", labels, (_HTTP_PORT, DASHBOARD_PORT, METRICS_PORT))
    path.write_text(
        "# A Ray service on Kubernetes, by KubeRay 1.5.1 or newer, which makes Ray's token. The image needs nonet[serve]; the "
        "volume has the run's folder.\n" + "---\n".join(map(yaml.dump, (policy, ray_service)))
    )
    return path


def _build_ray_service(
    run: str, config: dict[str, Any], services: ServicesConfig, image: str | None
) -> dict[str, Any]:
    """Build the RayService: Serve's application, a head pod, and worker pods in two groups, of which one has the engines."""
    image = image or _IMAGE.format(version=nonet.__version__)
    template = _read_template()
    serve, service = template["serve"], template["service"]
    serve["applications"][0]["args"] = {"run": run, "config": config}
    service["spec"]["serveConfigV2"] = yaml.dump(serve)
    cluster = service["spec"]["rayClusterConfig"]
    cluster["headGroupSpec"]["template"] = _build_pod("head", image, {"cpu": "1", "memory": "4Gi"})
    cluster["workerGroupSpecs"] = [
        _build_group("access", [services.access, services.features], image),
        _build_group("engine", [services.engine], image),
    ]
    return service


def _read_template() -> dict[str, Any]:
    """Return the RayService ("service"), the configuration of Serve ("serve") and the pod ("pod") of rayservice.yaml."""
    ports = {"http_port": _HTTP_PORT, "metrics_port": METRICS_PORT}
    tokens = {"write_token": WRITE_TOKEN, "read_token": READ_TOKEN}
    application = "nonet.deploy.serving:build_app"
    filled = fill_template("rayservice.yaml", ray=version("ray"), application=application, **ports, **tokens)
    return yaml.parse(filled)


def _build_group(name: str, services: list[DeploymentConfig], image: str) -> dict[str, Any]:
    """Build a worker group with one pod for each replica of some services, large enough for any of them."""
    min_pods = sum(service.least for service in services)
    max_pods = sum(service.most for service in services)
    resources = {"cpu": f"{max(service.cpus for service in services):g}", "memory": "8Gi"}
    if gpus := max(service.gpus for service in services):
        resources["nvidia.com/gpu"] = f"{-(-gpus // 1):g}"  # rounded up, because pods get whole devices
    if npus := max(service.resources.get("NPU", 0) for service in services):
        resources["huawei.com/Ascend910"] = f"{-(-npus // 1):g}"
    return {
        "groupName": name,
        "replicas": min_pods,
        "minReplicas": min_pods,
        "maxReplicas": max_pods,
        "rayStartParams": {"metrics-export-port": str(METRICS_PORT)},
        "template": _build_pod(name, image, resources),
    }


def _build_pod(name: str, image: str, resources: dict[str, str]) -> dict[str, Any]:
    """Build the template of a pod, which mounts the runs and reads the tokens from the secret `nonet`."""
    pod = _read_template()["pod"]
    (container,) = pod["spec"]["containers"]
    container["name"], container["image"] = f"ray-{name}", image
    container["resources"] = {"requests": dict(resources), "limits": dict(resources)}
    return pod
