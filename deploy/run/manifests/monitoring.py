"""The dashboard and the alert rules of training runs, over the metrics that `nonet.controller.record.tracking` exports."""

from __future__ import annotations

import json
from typing import Any

from nonet import yaml
from nonet.deploy.run.manifests.dashboards import AlertRule, DashboardPanel, build_alerts, build_dashboard

# A value stays on the port of its node after its process has ended, so panels and rules select processes that are alive.
_WORKS = "and on (run, WorkerId) time() - ray_nonet_run_updated_timestamp_seconds < 60"
_RUN = 'run=~"$run"'

_PANELS = (
    DashboardPanel(
        "Applied steps", f"max by (run, stage) (ray_nonet_train_step{{{_RUN}}})", "{{run}} {{stage}}", "short"
    ),
    DashboardPanel(
        "Rows per second", f"ray_nonet_train_rows_per_second{{{_RUN}}} {_WORKS}", "{{run}} {{stage}}", "short"
    ),
    DashboardPanel(
        "Loss in nats", f"ray_nonet_train_loss_nats{{{_RUN}}} {_WORKS}", "{{run}} {{stage}}", "short"
    ),
    DashboardPanel(
        "Mean reward", f"ray_nonet_train_reward{{{_RUN}}} {_WORKS}", "{{run}} {{stage}} {{reward}}", "short"
    ),
    DashboardPanel(
        "Seconds of a trainer by phase, per second of training",
        f'sum by (run, phase) (rate(ray_nonet_train_phase_seconds_total{{{_RUN}, phase!="all"}}[5m]))'
        f' / on (run) group_left sum by (run) (rate(ray_nonet_train_phase_seconds_total{{{_RUN}, phase="all"}}[5m]))',
        "{{run}} {{phase}}",
        "percentunit",
    ),
    DashboardPanel(
        "Busy workers", "sum by (method) (rate(ray_nonet_busy_seconds_total[1m]))", "{{method}}", "short"
    ),
    DashboardPanel(
        "Bytes that workers return per second",
        "sum by (method) (rate(ray_nonet_bytes_out_total[1m]))",
        "{{method}}",
        "Bps",
    ),
    DashboardPanel("Workers", f"ray_nonet_run_workers{{{_RUN}}} {_WORKS}", "{{run}} {{group}}", "short"),
    DashboardPanel(
        "Silent workers and isolated nodes",
        f"ray_nonet_run_silent_workers{{{_RUN}}} {_WORKS} or ray_nonet_run_isolated_nodes{{{_RUN}}} {_WORKS}",
        "{{run}} {{__name__}}",
        "short",
    ),
    DashboardPanel("Recoveries", f"ray_nonet_run_restarts{{{_RUN}}}", "{{run}}", "short"),
    DashboardPanel(
        "Seconds to write a checkpoint", f"ray_nonet_checkpoint_seconds{{{_RUN}}} {_WORKS}", "{{run}}", "s"
    ),
    DashboardPanel(
        "Bytes of a checkpoint", f"ray_nonet_checkpoint_bytes{{{_RUN}}} {_WORKS}", "{{run}}", "bytes"
    ),
    DashboardPanel(
        "Age of the newest checkpoint",
        f"time() - ray_nonet_checkpoint_timestamp_seconds{{{_RUN}}} {_WORKS}",
        "{{run}}",
        "s",
    ),
    DashboardPanel(
        "Requests to storage per second",
        f"sum by (run, operation) (rate(ray_nonet_storage_requests_total{{{_RUN}}}[1m]))",
        "{{run}} {{operation}}",
        "reqps",
    ),
    DashboardPanel(
        "Seconds of a request to storage",
        f"sum by (run, operation) (rate(ray_nonet_storage_seconds_total{{{_RUN}}}[5m]))"
        f" / sum by (run, operation) (rate(ray_nonet_storage_requests_total{{{_RUN}}}[5m]))",
        "{{run}} {{operation}}",
        "s",
    ),
    DashboardPanel(
        "Repeated writes to storage",
        f"sum by (run, operation) (ray_nonet_storage_repetitions_total{{{_RUN}}})",
        "{{run}} {{operation}}",
        "short",
    ),
    DashboardPanel(
        "Failed requests to storage",
        f"sum by (run, operation) (ray_nonet_storage_failures_total{{{_RUN}}})",
        "{{run}} {{operation}}",
        "short",
    ),
)

# The controller that was alive last, of those that a run has had, has not said that the run has ended.
_HAS_NOT_ENDED = (
    "max by (run) (ray_nonet_run_updated_timestamp_seconds * ray_nonet_run_active)"
    " == max by (run) (ray_nonet_run_updated_timestamp_seconds)"
)
_ALERTS = (
    AlertRule(
        "NonetRunFailed",
        "ray_nonet_run_failed == 1 and on (run, WorkerId) time() - ray_nonet_run_updated_timestamp_seconds"
        f" < 3600 unless on (run) (ray_nonet_run_active == 1 {_WORKS})",
        "0m",
        "A run has failed; its report and log say why.",
    ),
    AlertRule(
        "NonetRunSilent",
        f"time() - ({_HAS_NOT_ENDED}) > 120",
        "1m",
        "The controller of a run has not been alive for two minutes; nonet status RUN.",
    ),
    AlertRule(
        "NonetRunStalls",
        "time() - max by (run) (ray_nonet_train_progress_timestamp_seconds) > 1200 and on (run) "
        f"(ray_nonet_run_waits > 0 {_WORKS})",
        "5m",
        "A run has reported no step for 20 minutes; nonet why RUN.",
    ),
    AlertRule(
        "NonetRunRestarts",
        f"delta(ray_nonet_run_restarts[1h]) > 2 {_WORKS}",
        "0m",
        "A run has lost workers more than twice in an hour.",
    ),
    AlertRule(
        "NonetWorkersSilent",
        f"ray_nonet_run_silent_workers > 0 {_WORKS}",
        "5m",
        "Workers of a run do not answer; nonet why RUN.",
    ),
    AlertRule(
        "NonetNodesIsolated",
        f"ray_nonet_run_isolated_nodes > 0 {_WORKS}",
        "10m",
        "Nodes failed their probes, and a run does not use them; nonet why RUN.",
    ),
    AlertRule(
        "NonetStepsSkipped",
        "increase(ray_nonet_train_skipped_steps_total[15m]) > 5",
        "0m",
        "Steps are skipped because their loss or gradient is not finite.",
    ),
    AlertRule(
        "NonetCheckpointsLate",
        "time() - (ray_nonet_checkpoint_timestamp_seconds or on (run, WorkerId) ray_nonet_train_start_timestamp_seconds)"
        f" > 7200 {_WORKS}",
        "10m",
        "A run has written no checkpoint for two hours.",
    ),
    AlertRule(
        "NonetStorageFails",
        "increase(ray_nonet_storage_failures_total[10m]) > 0",
        "5m",
        "Requests to the storage of a run fail.",
    ),
    AlertRule(
        "NonetTrackerLate",
        f"ray_nonet_run_unsent_bytes > 1e6 {_WORKS}",
        "15m",
        "A tracker such as MLflow does not receive the metrics of a run.",
    ),
)


def build_monitoring_files() -> dict[str, str]:
    """Build the dashboard, the alert rules and the configuration of Prometheus for training runs; texts by file name."""
    run = {
        "name": "run", "type": "query", "label": "run", "multi": True, "includeAll": True, "allValue": ".*",
        "datasource": {"type": "prometheus", "uid": "${source}"}, "refresh": 2, "current": {"text": "All", "value": "$__all"},
        "query": {"query": "label_values(ray_nonet_run_active, run)", "refId": "run"},
    }  # fmt: skip
    return {
        "training-dashboard.json": json.dumps(
            build_dashboard("Nonet training", "nonet-training", _PANELS, [run]), indent=1
        ),
        "training-alerts.yaml": yaml.dump(build_alerts("nonet-training", _ALERTS)),
        "training-prometheus.yaml": yaml.dump(_build_prometheus_config()),
    }


def _build_prometheus_config() -> dict[str, Any]:
    """Build the configuration with which Prometheus finds the metrics ports of a Ray cluster on the same machine.

    Ray writes the file of addresses; on other clusters, `metrics_path` and the rules stay and the addresses change.
    """
    return {
        "global": {"scrape_interval": "10s"},
        "rule_files": ["training-alerts.yaml"],
        "scrape_configs": [
            {
                "job_name": "ray",
                "file_sd_configs": [{"files": ["/tmp/ray/prom_metrics_service_discovery.json"]}],
            }
        ],
    }
