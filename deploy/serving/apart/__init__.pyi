from .deployments import build_deployments as build_deployments
from .manifest import write_manifest as write_manifest
