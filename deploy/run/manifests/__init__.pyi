from .dashboards import Alert as Alert
from .dashboards import Panel as Panel
from .dashboards import build_alerts as build_alerts
from .dashboards import build_dashboard as build_dashboard
from .write import write_manifests as write_manifests
