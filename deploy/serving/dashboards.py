"""`nonet serve --monitoring DIR`: a Grafana dashboard, and configuration and alert rules for Prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nonet import yaml
from nonet.atomic import make_folder, write_whole

# (title, PromQL expression, legend, Grafana's unit)
_PANELS = (
    ("Requests per second", "sum by (status) (rate(nonet_requests_total[1m]))", "{{status}}", "reqps"),
    ("Response time, p99", "histogram_quantile(0.99, sum by (le, version) (rate(nonet_request_seconds_bucket[1m])))",
     "version {{version}}", "s"),
    ("Response time, p50", "histogram_quantile(0.5, sum by (le, version) (rate(nonet_request_seconds_bucket[1m])))",
     "version {{version}}", "s"),
    ("Queued questions", "sum by (version) (nonet_queue)", "version {{version}}", "short"),
    ("Questions per batch", "sum(rate(nonet_batched_questions[1m])) / sum(rate(nonet_batches[1m]))", "merged", "short"),
    ("Tokens per second", "sum(rate(nonet_batched_tokens[1m]))", "tokens", "short"),
    ("Default version", "nonet_version", "{{instance}}", "short"),
    ("Refused with 429", "sum by (why) (rate(nonet_refused_total[1m]))", "{{why}}", "reqps"),
    ("Fallbacks", "sum by (what, reason) (rate(nonet_fallbacks_total[1m]))", "{{what}}: {{reason}}", "reqps"),
    ("Hit rate of cached user states", "sum(rate(nonet_state_hits[5m]))"
     " / (sum(rate(nonet_state_hits[5m])) + sum(rate(nonet_state_misses[5m])))",
     "hits", "percentunit"),
)  # fmt: skip
# (name, PromQL expression, time for which it must be true, text)
_ALERTS = (
    ("NonetSlow", "histogram_quantile(0.99, sum by (le) (rate(nonet_request_seconds_bucket[5m]))) > 0.2", "5m",
     "The p99 response time is above 200 ms."),
    ("NonetFallsBack", "sum(rate(nonet_fallbacks_total[5m])) > 0.05 * sum(rate(nonet_requests_total[5m]))", "5m",
     "More than 5 % of answers come from a fallback."),
    ("NonetRefuses", 'sum(rate(nonet_refused_total{why="queue"}[5m])) > 0', "5m", "The queue is full; requests are refused."),
    ("NonetCannotServe", "max(nonet_problems) > 0", "1m", "A version or a checkpoint cannot be served; GET /versions says why."),
    ("NonetGone", 'up{job="nonet"} == 0', "1m", "A server does not answer."),
)  # fmt: skip


def write_monitoring(folder: Path, target: str) -> list[Path]:
    """Write dashboard.json, alerts.yaml and prometheus.yaml for a server.

    Args:
        folder: The folder to write to.
        target: The server's host:port.

    Returns:
        The paths of the files.
    """
    make_folder(folder)
    files = {
        "dashboard.json": json.dumps(build_dashboard(), indent=1),
        "alerts.yaml": yaml.dump(build_alerts()),
        "prometheus.yaml": yaml.dump(_build_prometheus_config(target)),
    }
    for name, text in files.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in files]


def build_dashboard() -> dict[str, Any]:
    """Build the Grafana dashboard as its JSON object."""
    panels = [
        {
            "id": index + 1,
            "type": "timeseries",
            "title": title,
            "datasource": {"type": "prometheus", "uid": "${source}"},
            # Two panels in a row of 24 columns.
            "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
        }
        for index, (title, expression, legend, unit) in enumerate(_PANELS)
    ]
    source = {"name": "source", "type": "datasource", "query": "prometheus", "current": {}}
    return {
        "title": "Nonet serving", "uid": "nonet-serving", "schemaVersion": 39, "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"}, "templating": {"list": [source]}, "panels": panels,
    }  # fmt: skip


def build_alerts() -> dict[str, Any]:
    """Build the alert rules of Prometheus."""
    rules = [
        {
            "alert": name,
            "expr": expression,
            "for": duration,
            "labels": {"severity": "page"},
            "annotations": {"summary": text},
        }
        for name, expression, duration, text in _ALERTS
    ]
    return {"groups": [{"name": "nonet", "rules": rules}]}


def _build_prometheus_config(target: str) -> dict[str, Any]:
    """Build the configuration with which Prometheus scrapes the server at `target` (host:port)."""
    return {
        "global": {"scrape_interval": "5s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "nonet", "static_configs": [{"targets": [target]}]}],
    }
