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
from nonet.deploy.run.manifests.request import ManifestRequest
from nonet.errors import ConfigError
from nonet.workers.devices import HOST

_MAX_PACKAGE_BYTES = 700_000  # a ConfigMap holds 1 MiB, in which the package has four thirds of its size
METRICS_PORT, DASHBOARD_PORT = 8080, 8265
TOKEN_OPTIONS = {"mode": "token"}
"""The `authOptions` of a cluster whose token KubeRay makes, from 1.5.1 on."""
_HEALTH_PORT = 52365  # of the agent of a Ray node
_HEAD_CPUS, _HEAD_GIB = 4, 16
_KEPT_S = 3600  # how long a finished job and its logs stay


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
    policy = build_network_policy(request.name, _make_pod_labels(request), (DASHBOARD_PORT, METRICS_PORT))
    documents = (config_map, policy, _build_ray_job(request))
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


def _make_pod_labels(request: ManifestRequest) -> dict[str, str]:
    """Return the labels of the pods of a run."""
    return {"nonet.io/run": request.name}


def _build_ray_job(request: ManifestRequest) -> dict[str, Any]:
    """Build the RayJob. A retry continues the run from its newest checkpoint."""
    unpack = "mkdir -p /tmp/job && cd /tmp/job && python -m zipfile -e /package/package.zip ."
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": request.name, "labels": _make_queue_labels(request.queue)},
        "spec": {
            "entrypoint": f"bash -c '{unpack} && exec nonet job {request.name}'",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _KEPT_S,
            "backoffLimit": 2,
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "authOptions": dict(TOKEN_OPTIONS),
                "headGroupSpec": {
                    "rayStartParams": {
                        "num-cpus": "0",
                        "num-gpus": "0",
                        "dashboard-host": "0.0.0.0",
                        "metrics-export-port": str(METRICS_PORT),
                    },
                    "template": _build_pod(
                        request, "head", {"cpu": f"{_HEAD_CPUS}", "memory": f"{_HEAD_GIB}Gi"}
                    ),
                },
                "workerGroupSpecs": [_build_group(request, group) for group in request.groups],
            },
        },
    }


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
    container = {
        "name": f"ray-{name}",
        "image": request.make_image(device),
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "env": [
            {"name": "NONET_RUNS", "value": "/runs"},
            {"name": "NONET_CACHE", "value": "/cache"},
        ],
        "envFrom": [{"secretRef": {"name": "nonet", "optional": True}}],
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "readinessProbe": _build_probe(periodSeconds=5, failureThreshold=60),
        "livenessProbe": _build_probe(initialDelaySeconds=60, periodSeconds=10, failureThreshold=30),
        "volumeMounts": [
            {"name": "cache", "mountPath": "/cache"},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    volumes: list[dict[str, Any]] = [
        {"name": "cache", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    if not request.is_stored:  # all pods reach the run's folder at one path
        container["volumeMounts"].append({"name": "runs", "mountPath": "/runs"})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": "nonet-runs"}})
    if name == "head":
        container["volumeMounts"].append({"name": "package", "mountPath": "/package"})
        volumes.append({"name": "package", "configMap": {"name": f"{request.name}-package"}})
    annotations = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)}
    metadata = {"labels": _make_pod_labels(request), "annotations": annotations}
    return {"metadata": metadata, "spec": {"containers": [container], "volumes": volumes}}


def _build_probe(**times: int) -> dict[str, Any]:
    """Build a probe of the Ray node in a pod."""
    path = {"path": "/api/local_raylet_healthz", "port": _HEALTH_PORT}
    return {"httpGet": path, "timeoutSeconds": 5, **times}
