from .kuberay import DASHBOARD_PORT as DASHBOARD_PORT
from .kuberay import METRICS_PORT as METRICS_PORT
from .kuberay import build_network_policy as build_network_policy
from .monitoring import write_monitoring as write_monitoring
from .request import fill_template as fill_template
from .write import write_manifests as write_manifests
