"""The report of a finished run as one HTML page, which needs no network access, scripts or other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from nonet.atomic import open_file, read_json, refuse_damage, write_whole
from nonet.deploy.report.curves import read_curves
from nonet.deploy.report.page import render_page
from nonet.errors import ConfigError


def write_report(run_dir: Path, page_dir: Path | None = None) -> Path:
    """Write report.html atomically from RUN's report.json, metrics.jsonl and scenario.yaml.

    Args:
        run_dir: The run's folder. Only report.json must exist; sections whose numbers are missing are left
            out.
        page_dir: The folder of the page, by default that of the run.

    Returns:
        The path of the page.

    Raises:
        ConfigError: report.json is missing or damaged, or a file is no regular file.
    """
    run_dir = Path(run_dir)
    report = _read_report(run_dir / "report.json")
    curves, unread = read_curves(run_dir / "metrics.jsonl")
    scenario_path = run_dir / "scenario.yaml"
    scenario = ""
    if scenario_path.exists():
        with open_file(scenario_path) as file:
            scenario = file.read().decode()
    page_path = (page_dir or run_dir) / "report.html"
    with refuse_damage(run_dir / "report.json"):
        try:
            page = render_page(report, curves=curves, scenario=scenario, unread=unread)
        except TemplateError as error:  # a value that the report lacks
            raise ValueError(error.message) from error
    write_whole(page_path, page.encode())
    return page_path


def _read_report(path: Path) -> dict[str, Any]:
    """Read report.json as an object. Raises ConfigError if it is missing or not a JSON object."""
    try:
        report = read_json(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} has no report.json, which a run writes when it evaluates; resume the run first"
        ) from None
    if not isinstance(report, dict):
        raise ConfigError(
            f"{path} must hold an object, got {type(report).__name__}; resume the run to write it again"
        )
    return report
