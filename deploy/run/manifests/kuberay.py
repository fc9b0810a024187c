"""A RayJob of KubeRay that runs a scenario on Kubernetes, with labels for Kueue or Volcano.

The scenario and the files that it names travel as a package in a ConfigMap, as they do in a job of `nonet submit`, so that the
job checks them and continues the run if it has a checkpoint.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import nonet
from nonet import yaml
from nonet.deploy.run.manifests.node_groups import NodeGroup
from nonet.deploy.run.manifests.request import ManifestRequest, fill_template
from nonet.errors import ConfigError
from nonet.workers.devices import HOST

_MAX_PACKAGE_BYTES = 700_000  # a ConfigMap holds 1 MiB, in which the package has four thirds of its size
METRICS_PORT, DASHBOARD_PORT = 8080, 8265
_HEAD_RESOURCES = {"cpu": "4", "memory": "16Gi"}


def build_kuberay_files(request: ManifestRequest) -> dict[str, str]:
    """Build rayjob.yaml.

    Raises:
        ConfigError: The package is too large, a device has no resource on Kubernetes, or the queue has no name.
    """
    package = request.read_package()
    if len(package) > _MAX_PACKAGE_BYTES:
        raise ConfigError(
            f"--form kuberay: the scenario and its files have {len(package) / 1e6:.1f} MB packed, and a ConfigMap holds "
            f"{_MAX_PACKAGE_BYTES / 1e6:.1f} MB; put tables and models on a store and give their addresses"
        )
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{request.name}-package"},
        "binaryData": {"package.zip": base64.b64encode(package).decode()},
    }
    comment = (
        "# Runs a scenario on Kubernetes, by KubeRay: kubectl apply -f rayjob.yaml. The image needs nonet "
        f"{nonet.__version__}.\n# Secrets and sizes of nodes are guesses: change them.\n"
    )
    job = _build_ray_job(request)
    labels = _build_pod(request, "head", {})["metadata"]["labels"]
    policy = build_network_policy(request.name, labels, (DASHBOARD_PORT, METRICS_PORT))
    documents = (config_map, policy, job)
    return {"rayjob.yaml": comment + "---\n".join(map(yaml.dump, documents))}


def build_network_policy(
    name: str, pod_labels: Mapping[str, str], open_ports: Iterable[int]
) -> dict[str, Any]:
    """Build the policy by which pods with some labels are reached by each other only, apart from open ports.

    The connections of gloo, NCCL and HCCL between trainers have no token.

    Args:
        name: The name of the run or service, with which that of the policy begins.
        pod_labels: The labels of its pods.
        open_ports: Ports that others reach: those that want a token, and those of metrics.
    """
    own_pods = {"podSelector": {"matchLabels": dict(pod_labels)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{name}-pods"},
        "spec": {
            **own_pods,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own_pods]},
                {"ports": [{"port": port, "protocol": "TCP"} for port in open_ports]},
            ],
        },
    }


def _read_template(request: ManifestRequest) -> dict[str, Any]:
    """Return the RayJob ("job") and the pod ("pod") of rayjob.yaml, with the name of the run."""
    return yaml.parse(
        fill_template("rayjob.yaml", name=request.name, ray=version("ray"), metrics_port=METRICS_PORT)
    )


def _build_ray_job(request: ManifestRequest) -> dict[str, Any]:
    """Build the RayJob."""
    job = _read_template(request)["job"]
    job["metadata"]["labels"] = _make_queue_labels(request.queue)
    cluster = job["spec"]["rayClusterSpec"]
    cluster["headGroupSpec"]["template"] = _build_pod(request, "head", _HEAD_RESOURCES)
    cluster["workerGroupSpecs"] = [_build_group(request, group) for group in request.groups]
    return job


def _make_queue_labels(queue: str) -> dict[str, str]:
    """Return the labels that give a job to a queue: `volcano:NAME` is one of Volcano, any other name one of Kueue."""
    scheduler, _, name = queue.rpartition(":")
    if scheduler not in ("", "kueue", "volcano") or (queue and not name):
        raise ConfigError(f"--queue {queue}: wanted a name, kueue:NAME or volcano:NAME")
    if scheduler == "volcano":
        return {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": name}
    return {"kueue.x-k8s.io/queue-name": name} if name else {}


def _build_group(request: ManifestRequest, group: NodeGroup) -> dict[str, Any]:
    """Build the worker group of a pool; each pod is a node."""
    resources = {"cpu": f"{group.cpus}", "memory": f"{group.memory_gib}Gi"}
    start = {"metrics-export-port": str(METRICS_PORT)}
    if group.devices:
        device = group.device
        if not device.pod_resource:
            raise ConfigError(
                f"--form kuberay: device {device.name} of pool {group.name} has no resource on Kubernetes; its vendor sets "
                "Device.pod_resource"
            )
        resources[device.pod_resource] = str(group.devices)
        if device.resource != "GPU":  # KubeRay derives only GPUs from the limits of a pod
            start["resources"] = f"'{{\"{device.resource}\": {group.devices}}}'"
    if group.labels:
        start["labels"] = ",".join(f"{name}={value}" for name, value in group.labels.items())
    return {
        "groupName": group.name,
        "replicas": group.least,
        "minReplicas": group.least,
        "maxReplicas": group.most,
        "rayStartParams": start,
        "template": _build_pod(request, group.name, resources, group.device.name),
    }


def _build_pod(
    request: ManifestRequest, name: str, resources: dict[str, str], device: str = HOST
) -> dict[str, Any]:
    """Build the template of a pod, with variables from the secret `nonet` and probes of its Ray node."""
    pod = _read_template(request)["pod"]
    (container,), volumes = pod["spec"]["containers"], pod["spec"]["volumes"]
    container["name"], container["image"] = f"ray-{name}", request.make_image(device)
    container["resources"] = {"requests": dict(resources), "limits": dict(resources)}
    if not request.is_stored:  # all pods reach the run's folder at one path
        container["volumeMounts"].append({"name": "runs", "mountPath": "/runs"})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": "nonet-runs"}})
    if name == "head":
        container["volumeMounts"].append({"name": "package", "mountPath": "/package"})
        volumes.append({"name": "package", "configMap": {"name": f"{request.name}-package"}})
    return pod
