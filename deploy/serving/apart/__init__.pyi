from .deployments import apart as apart
from .manifest import write_manifest as write_manifest
