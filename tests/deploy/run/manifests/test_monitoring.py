"""The dashboard and the rules of training runs ask for metrics that runs export, and fire when they should."""

from __future__ import annotations

import json
import re

from nonet import yaml
from nonet.controller.record.tracking.kinds.prometheus import FAMILIES
from nonet.deploy.run.manifests.monitoring import build_monitoring_files
from tests.promtool import check_with_promtool, needs_promtool

WORKERS = {"nonet_busy_seconds_total", "nonet_bytes_out_total"}  # what workers export besides


def list_expressions() -> tuple[list[str], list[str]]:
    """Return the expressions of the panels and those of the rules."""
    files = build_monitoring_files()
    panels = json.loads(files["training-dashboard.json"])["panels"]
    rules = yaml.parse(files["training-alerts.yaml"])["groups"][0]["rules"]
    return [panel["targets"][0]["expr"] for panel in panels], [rule["expr"] for rule in rules]


def test_the_dashboard_and_the_rules_ask_for_metrics_that_runs_export():
    panels, rules = list_expressions()
    asked = {name for expression in (*panels, *rules) for name in re.findall(r"nonet_\w+", expression)}
    assert asked <= FAMILIES.keys() | WORKERS
    assert FAMILIES.keys() - asked == {
        "nonet_train_steps",
        "nonet_train_metric",
        "nonet_train_rows_total",
        "nonet_checkpoints_total",
    }
    assert all(expression.count("(") == expression.count(")") for expression in (*panels, *rules))
    labels = {label for family in FAMILIES.values() for label in family.labels} | {
        "run",
        "WorkerId",
        "method",
    }
    for expression in panels:
        assert set(re.findall(r"(\w+)(?:=~|!=|=)\"", expression)) <= labels, expression


def test_values_are_those_of_controllers_that_were_alive_within_the_last_minute_or_hour():
    panels, rules = list_expressions()
    selections = re.findall(
        r"time\(\) - ray_nonet_run_updated_timestamp_seconds (\S) (\d+)", " ".join((*panels, *rules))
    )
    assert set(selections) == {("<", "60"), ("<", "3600")}


def test_a_run_without_any_checkpoint_is_late_from_the_begin_of_its_training_on():
    rules = yaml.parse(build_monitoring_files()["training-alerts.yaml"])["groups"][0]["rules"]
    (late,) = (rule["expr"] for rule in rules if rule["alert"] == "NonetCheckpointsLate")
    assert (
        "(ray_nonet_checkpoint_timestamp_seconds or on (run, WorkerId) ray_nonet_train_start_timestamp_seconds) > 7200"
        in late
    )


def test_counters_end_in_total_and_other_names_in_their_unit():
    for name, family in FAMILIES.items():
        assert name.endswith("_total") == (family.kind == "counter"), name


# Two controllers of one run: the first was killed at 5 min, the second ends at 20 min; `hung` stops answering at 5 min.
_TEST = """
rule_files: [training-alerts.yaml]
evaluation_interval: 30s
tests:
- interval: 1m
  input_series:
  - {series: 'ray_nonet_run_updated_timestamp_seconds{run="moved",WorkerId="a"}', values: '0+60x5 300x40'}
  - {series: 'ray_nonet_run_active{run="moved",WorkerId="a"}', values: '1x45'}
  - {series: 'ray_nonet_run_updated_timestamp_seconds{run="moved",WorkerId="b"}', values: '_x5 360+60x14 1200x25'}
  - {series: 'ray_nonet_run_active{run="moved",WorkerId="b"}', values: '_x5 1x14 0x26'}
  - {series: 'ray_nonet_run_updated_timestamp_seconds{run="hung",WorkerId="c"}', values: '0+60x5 300x40'}
  - {series: 'ray_nonet_run_active{run="hung",WorkerId="c"}', values: '1x45'}
  - {series: 'ray_nonet_run_updated_timestamp_seconds{run="broken",WorkerId="d"}', values: '0+60x5 300x40'}
  - {series: 'ray_nonet_run_active{run="broken",WorkerId="d"}', values: '1x5 0x40'}
  - {series: 'ray_nonet_run_failed{run="broken",WorkerId="d"}', values: '0x5 1x40'}
  - {series: 'ray_nonet_run_updated_timestamp_seconds{run="new",WorkerId="e"}', values: '0+60x200'}
  - {series: 'ray_nonet_run_active{run="new",WorkerId="e"}', values: '1x200'}
  - {series: 'ray_nonet_train_start_timestamp_seconds{run="new",WorkerId="e"}', values: '_x5 300x195'}
  - {series: 'ray_nonet_run_updated_timestamp_seconds{run="saved",WorkerId="f"}', values: '0+60x200'}
  - {series: 'ray_nonet_run_active{run="saved",WorkerId="f"}', values: '1x200'}
  - {series: 'ray_nonet_train_start_timestamp_seconds{run="saved",WorkerId="f"}', values: '300x200'}
  - {series: 'ray_nonet_checkpoint_timestamp_seconds{run="saved",WorkerId="f"}', values: '_x60 3600x140'}
  alert_rule_test:
  - {eval_time: 130m, alertname: NonetCheckpointsLate, exp_alerts: []}
  - eval_time: 150m
    alertname: NonetCheckpointsLate
    exp_alerts:
    - exp_labels: {severity: page, run: new, WorkerId: e}
      exp_annotations: {summary: "A run has written no checkpoint for two hours."}
  - {eval_time: 4m, alertname: NonetRunSilent, exp_alerts: []}
  - {eval_time: 4m, alertname: NonetRunFailed, exp_alerts: []}
  - eval_time: 30m
    alertname: NonetRunSilent
    exp_alerts:
    - exp_labels: {severity: page, run: hung}
      exp_annotations: {summary: "The controller of a run has not been alive for two minutes; nonet status RUN."}
  - eval_time: 30m
    alertname: NonetRunFailed
    exp_alerts:
    - exp_labels: {severity: page, run: broken, WorkerId: d}
      exp_annotations: {summary: "A run has failed; its report and log say why."}
"""


@needs_promtool
def test_prometheus_accepts_the_files_and_rules_fire_for_runs_that_hang_or_fail_alone(tmp_path):
    for name, text in build_monitoring_files().items():
        (tmp_path / name).write_text(text)
    expressions = [expression.replace("$run", ".*") for expression in list_expressions()[0]]
    check_with_promtool(tmp_path, "training-prometheus.yaml", expressions, _TEST)
