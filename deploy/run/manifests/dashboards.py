"""Grafana dashboards and alert rules of Prometheus, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DashboardPanel:
    """A chart of a dashboard.

    Attributes:
        title: The title.
        expression: The PromQL expression.
        legend: The name of each line, with labels in {{}}.
        unit: Grafana's unit.
    """

    title: str
    expression: str
    legend: str
    unit: str


@dataclass(frozen=True, slots=True)
class AlertRule:
    """An alert rule.

    Attributes:
        name: The name.
        expression: The PromQL expression, which is true while there is a problem.
        duration: How long it must be true, such as "5m".
        text: What is wrong, in one sentence.
    """

    name: str
    expression: str
    duration: str
    text: str


def build_dashboard(
    title: str, uid: str, panels: Sequence[DashboardPanel], variables: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Build a Grafana dashboard as its JSON object.

    Args:
        title: The title.
        uid: The id by which Grafana replaces an older version.
        panels: The charts, two in a row.
        variables: Further variables than the source of the data, as Grafana's JSON objects.
    """
    charts = [
        {
            "id": index + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": {"type": "prometheus", "uid": "${source}"},
            # Two panels in a row of 24 columns.
            "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "expr": panel.expression, "legendFormat": panel.legend}],
        }
        for index, panel in enumerate(panels)
    ]
    source = {"name": "source", "type": "datasource", "query": "prometheus", "current": {}}
    return {
        "title": title, "uid": uid, "schemaVersion": 39, "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"}, "templating": {"list": [source, *variables]}, "panels": charts,
    }  # fmt: skip


def build_alerts(group: str, alerts: Sequence[AlertRule]) -> dict[str, Any]:
    """Build a file of alert rules for Prometheus, with one group."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.duration,
            "labels": {"severity": "page"},
            "annotations": {"summary": alert.text},
        }
        for alert in alerts
    ]
    return {"groups": [{"name": group, "rules": rules}]}
