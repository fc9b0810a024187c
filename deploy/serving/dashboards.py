"""`nonet serve --monitoring DIR`: a Grafana dashboard, and configuration and alert rules for Prometheus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nonet import yaml
from nonet.atomic import make_folder, write_whole
from nonet.deploy.run.manifests import AlertRule, DashboardPanel, build_alerts, build_dashboard

_PANELS = (
    DashboardPanel(
        "Requests per second", "sum by (status) (rate(nonet_requests_total[1m]))", "{{status}}", "reqps"
    ),
    DashboardPanel(
        "Response time, p99",
        "histogram_quantile(0.99, sum by (le, version) (rate(nonet_request_seconds_bucket[1m])))",
        "version {{version}}",
        "s",
    ),
    DashboardPanel(
        "Response time, p50",
        "histogram_quantile(0.5, sum by (le, version) (rate(nonet_request_seconds_bucket[1m])))",
        "version {{version}}",
        "s",
    ),
    DashboardPanel("Queued questions", "sum by (version) (nonet_queue)", "version {{version}}", "short"),
    DashboardPanel(
        "Questions per batch",
        "sum(rate(nonet_batched_questions[1m])) / sum(rate(nonet_batches[1m]))",
        "merged",
        "short",
    ),
    DashboardPanel("Tokens per second", "sum(rate(nonet_batched_tokens[1m]))", "tokens", "short"),
    DashboardPanel("Default version", "nonet_version", "{{instance}}", "short"),
    DashboardPanel("Refused with 429", "sum by (why) (rate(nonet_refused_total[1m]))", "{{why}}", "reqps"),
    DashboardPanel(
        "Fallbacks",
        "sum by (what, reason) (rate(nonet_fallbacks_total[1m]))",
        "{{what}}: {{reason}}",
        "reqps",
    ),
    DashboardPanel(
        "Hit rate of cached user states",
        "sum(rate(nonet_state_hits[5m]))"
        " / (sum(rate(nonet_state_hits[5m])) + sum(rate(nonet_state_misses[5m])))",
        "hits",
        "percentunit",
    ),
)
_ALERTS = (
    AlertRule(
        "NonetSlow",
        "histogram_quantile(0.99, sum by (le) (rate(nonet_request_seconds_bucket[5m]))) > 0.2",
        "5m",
        "The p99 response time is above 200 ms.",
    ),
    AlertRule(
        "NonetFallsBack",
        "sum(rate(nonet_fallbacks_total[5m])) > 0.05 * sum(rate(nonet_requests_total[5m]))",
        "5m",
        "More than 5 % of answers come from a fallback.",
    ),
    AlertRule(
        "NonetRefuses",
        'sum(rate(nonet_refused_total{why="queue"}[5m])) > 0',
        "5m",
        "The queue is full; requests are refused.",
    ),
    AlertRule(
        "NonetCannotServe",
        "max(nonet_problems) > 0",
        "1m",
        "A version or a checkpoint cannot be served; GET /versions says why.",
    ),
    AlertRule("NonetGone", 'up{job="nonet"} == 0', "1m", "A server does not answer."),
)


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
        "dashboard.json": json.dumps(build_dashboard("Nonet serving", "nonet-serving", _PANELS), indent=1),
        "alerts.yaml": yaml.dump(build_alerts("nonet", _ALERTS)),
        "prometheus.yaml": yaml.dump(_build_prometheus_config(target)),
    }
    for name, text in files.items():
        write_whole(folder / name, text.encode())
    return [folder / name for name in files]


def _build_prometheus_config(target: str) -> dict[str, Any]:
    """Build the configuration with which Prometheus scrapes the server at `target` (host:port)."""
    return {
        "global": {"scrape_interval": "5s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "nonet", "static_configs": [{"targets": [target]}]}],
    }
