"""The files with which training runs and servers are watched: a Grafana dashboard, alert rules and Prometheus' configuration.

What they show and report is in `templates/training.yaml` and `templates/serving.yaml`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nonet import yaml
from nonet.atomic import make_folder, write_whole
from nonet.deploy.run.manifests.request import fill_template


def build_monitoring_files() -> dict[str, str]:
    """Build the files of training runs; texts by file name."""
    return {f"training-{name}": text for name, text in _build_files("training").items()}


def write_monitoring(folder: Path, target: str) -> list[Path]:
    """Write dashboard.json, alerts.yaml and prometheus.yaml for a server.

    Args:
        folder: The folder to write to.
        target: The server's host:port.

    Returns:
        The paths of the files.
    """
    make_folder(folder)
    files = _build_files("serving", target)
    for name, text in files.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in files]


def _build_files(template: str, target: str = "") -> dict[str, str]:
    """Build the files from a template; texts by file name."""
    facts = yaml.parse(fill_template(f"{template}.yaml", target=target))
    rules = [
        {
            "alert": alert["alert"],
            "expr": _fill_expression(alert["expr"], facts),
            "for": alert["for"],
            "labels": {"severity": "page"},
            "annotations": {"summary": alert["text"]},
        }
        for alert in facts["alerts"]
    ]
    return {
        "dashboard.json": json.dumps(_build_dashboard(facts), indent=1),
        "alerts.yaml": yaml.dump({"groups": [{"name": facts["group"], "rules": rules}]}),
        "prometheus.yaml": yaml.dump(facts["prometheus"]),
    }


def _build_dashboard(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Build a Grafana dashboard as its JSON object, with two charts in a row of 24 columns."""
    charts = [
        {
            "id": index + 1,
            "type": "timeseries",
            "title": panel["title"],
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
            "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
            "targets": [
                {
                    "refId": "A",
                    "expr": _fill_expression(panel["expr"], facts),
                    "legendFormat": panel["legend"],
                }
            ],
        }
        for index, panel in enumerate(facts["panels"])
    ]
    source = {"name": "source", "type": "datasource", "query": "prometheus", "current": {}}
    return {
        "title": facts["title"], "uid": facts["uid"], "schemaVersion": 39, "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"}, "templating": {"list": [source, *facts["variables"]]}, "panels": charts,
    }  # fmt: skip


def _fill_expression(expression: str, facts: Mapping[str, Any]) -> str:
    """Replace @works@ in an expression of PromQL by the text that it stands for, and return the expression."""
    return expression.replace("@works@", facts.get("works", ""))
