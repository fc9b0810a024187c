"""What is shown of a server: `nonet top`, the dashboard and the alert rules read metrics that there are."""

from __future__ import annotations

import json
import re
import socket
from types import SimpleNamespace

import pytest

from nonet import yaml
from nonet.deploy.run.manifests import write_monitoring
from nonet.deploy.serving.service import ServerMetrics
from nonet.deploy.serving.top import compute_figures, parse_metrics
from tests.promtool import check_with_promtool, needs_promtool


class Nothing:
    """Engines of no version and a breaker that is closed."""

    swaps, problems, state = 0, {}, "closed"

    serving = SimpleNamespace(default=3)

    @staticmethod
    def get_facts():
        return {}


@pytest.fixture
def metrics():
    made = ServerMetrics()
    made.watch(Nothing, Nothing)
    return made


def test_a_server_that_does_not_answer_is_one_line(command):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, _, err = command("top", url, "--times", 1)
    assert (code, err.count("\n")) == (1, 1)
    assert f"{url} does not answer" in err


def test_figures_are_of_what_came_between_two_looks(metrics):
    before = parse_metrics(metrics.render().decode())
    for number in range(100):
        metrics.requests.labels("recommend", "200", "3").inc()
        metrics.seconds.labels("recommend", "3").observe(0.004 if number < 98 else 0.18)
    metrics.fallbacks.labels("popularity", "deadline").inc(2)
    found = compute_figures(parse_metrics(metrics.render().decode()), before, 2.0)
    assert found["requests/s"] == 50
    assert 0 < found["p50 ms"] <= 5
    assert 150 < found["p99 ms"] <= 200
    assert (found["fallbacks"], found["version"]) == (2, 3)
    after = parse_metrics(metrics.render().decode())
    assert compute_figures(after, after, 1.0)["p99 ms"] == 0


def test_the_dashboard_and_the_rules_ask_for_metrics_that_a_server_has(metrics, tmp_path):
    metrics.requests.labels("recommend", "200", "3").inc()
    there = set(re.findall(r"^# TYPE (nonet_\w+)", metrics.render().decode(), re.M))
    there |= {f"{name}_bucket" for name in there}
    files = write_monitoring(tmp_path, "127.0.0.1:8000")
    assert [path.name for path in files] == ["dashboard.json", "alerts.yaml", "prometheus.yaml"]
    panels = json.loads(files[0].read_text())["panels"]
    rules = yaml.read(files[1])["groups"][0]["rules"]
    asked = [panel["targets"][0]["expr"] for panel in panels] + [rule["expr"] for rule in rules]
    for expression in asked:
        names = set(re.findall(r"nonet_\w+", expression))
        assert names <= there, expression
        assert expression.count("(") == expression.count(")")
    assert yaml.read(files[2])["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:8000"]


_FALLS_BACK = """
rule_files: [alerts.yaml]
evaluation_interval: 30s
tests:
- interval: 30s
  input_series:
  - {series: 'nonet_fallbacks_total{what="popularity",reason="deadline"}', values: '0+10x30'}
  - {series: 'nonet_requests_total{verb="recommend",status="200",version="1"}', values: '0+100x30'}
  alert_rule_test:
  - {eval_time: 12m, alertname: NonetRefuses, exp_alerts: []}
  - eval_time: 12m
    alertname: NonetFallsBack
    exp_alerts:
    - {exp_labels: {severity: page}, exp_annotations: {summary: "More than 5 % of answers come from a fallback."}}
"""


@needs_promtool
def test_prometheus_takes_the_rules_and_the_dashboards_questions(tmp_path):
    files = write_monitoring(tmp_path, "127.0.0.1:8000")
    panels = json.loads(files[0].read_text())["panels"]
    expressions = [panel["targets"][0]["expr"] for panel in panels]
    check_with_promtool(tmp_path, "prometheus.yaml", expressions, _FALLS_BACK)
