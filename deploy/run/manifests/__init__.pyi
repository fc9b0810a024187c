from .dashboards import AlertRule as AlertRule
from .dashboards import DashboardPanel as DashboardPanel
from .dashboards import build_alerts as build_alerts
from .dashboards import build_dashboard as build_dashboard
from .write import write_manifests as write_manifests
