"""The fields of a RayJob that manifests use, as facts: their types, and which of them are required.

Read from the types of KubeRay's API, github.com/ray-project/kuberay, ray-operator/apis/ray/v1 (rayjob_types.go at commit 0057210,
raycluster_types.go at commit 026f143), from which KubeRay generates its custom resource definitions. `...` stands for a pod.
"""

from __future__ import annotations

from typing import Any

POD: Any = ...
TEXTS = {str: str}  # a map of texts

WORKER_GROUP = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "rayStartParams": TEXTS,
    "template": POD,
}
HEAD_GROUP = {"rayStartParams": TEXTS, "template": POD}
RAY_CLUSTER = {
    "rayVersion": str,
    "authOptions": {"mode": str},  # since KubeRay 1.5.1
    "headGroupSpec": HEAD_GROUP,
    "workerGroupSpecs": [WORKER_GROUP],
}
RAY_JOB_SPEC = {
    "entrypoint": str,
    "backoffLimit": int,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "rayClusterSpec": RAY_CLUSTER,
}
REQUIRED = {"headGroupSpec", "rayStartParams", "template", "groupName", "minReplicas", "maxReplicas"}


def find_problems(value: Any, expected: Any, path: str, pods: list[tuple[str, Any]]) -> list[str]:
    """Compare a part of a manifest with its fields; its pod templates are added to `pods`."""
    if expected is POD:
        pods.append((path, value))
        return []
    if isinstance(expected, list):
        return [
            p
            for at, item in enumerate(value)
            for p in find_problems(item, expected[0], f"{path}[{at}]", pods)
        ]
    if expected == TEXTS:
        return [f"{path}.{k} is no text: {v!r}" for k, v in value.items() if not isinstance(v, str)]
    if isinstance(expected, dict):
        problems = [f"{path}.{key} is unknown" for key in value.keys() - expected.keys()]
        problems += [f"{path}.{key} is missing" for key in (expected.keys() & REQUIRED) - value.keys()]
        for key in value.keys() & expected.keys():
            problems += find_problems(value[key], expected[key], f"{path}.{key}", pods)
        return problems
    return [] if type(value) is expected else [f"{path} is {value!r}, not of {expected}"]
