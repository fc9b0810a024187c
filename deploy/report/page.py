"""The HTML page of a report: the verdict, the numbers on which it is based, and how the run was made.

`render_page` has no side effects, and the same report gives the same bytes. The templates escape every text that comes from the
run. A section is left out when its part of the report is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from nonet.controller.scenario.settings import describe_repeats
from nonet.deploy.report import beyond, tables
from nonet.deploy.report.charts import draw_forest_plot, draw_line_chart, draw_reliability_chart
from nonet.deploy.report.curves import Curve
from nonet.deploy.report.scores import format_name, iterate_differences, select_headline_metrics
from nonet.deploy.report.verdicts import collect_findings

_SHOWN_HISTORY = 8  # number of newest events of a user that are shown
_VALIDATION_NATS = "validation nats"


def render_page(
    report: Mapping[str, Any], *, curves: Sequence[Curve] = (), scenario: str = "", unread: int = 0
) -> str:
    """Render the whole page of a run's report.

    Args:
        report: The contents of report.json.
        curves: Curves of the run's metrics.
        scenario: The text of scenario.yaml.
        unread: Number of lines of metrics.jsonl that could not be read, mentioned below the curves.

    Returns:
        The HTML text.
    """
    differences = list(iterate_differences(report))
    headline_metrics = select_headline_metrics(report)
    headline_differences = [difference for difference in differences if difference.metric in headline_metrics]
    # Curves of a single point, such as a score at the end of a stage, are left out: the tables show these values.
    long_curves = [curve for curve in curves if len(curve.points) > 1]
    # The validation loss has no chart of its own: it is drawn with the training loss.
    # With tasks, the training loss is a sum over several labels, and that of validation is of the target alone.
    nats_by_stage = {
        curve.stage: curve.points
        for curve in long_curves
        if curve.name == _VALIDATION_NATS and not beyond.has_tasks(report)
    }
    drawn_curves = [curve for curve in long_curves if curve.name != _VALIDATION_NATS]
    # A model that makes no lists has none to describe; reports of earlier versions have no such part.
    makes_lists = report.get("lists") != {}
    return load_template("report.html").render(
        name=report.get("name") or report.get("run") or "run",
        subtitle=_format_subtitle(report),
        findings=collect_findings(report),
        scores=[
            tables.build_score_table(
                report,
                "test",
                "exhaustive",
                "Every catalogue item scored" if makes_lists else "Every test event scored",
            ),
            tables.build_score_table(report, "test", "beam", "By beam search"),
            tables.build_score_table(
                report,
                "shuffled",
                "exhaustive",
                "Every item scored, with each user's events of equal time shuffled",
            ),
        ],
        validation=[
            tables.build_score_table(report, "valid", search, f"Validation, {search}")
            for search in ("exhaustive", "beam")
        ],
        protocol="Full ranking of the catalogue."
        if makes_lists
        else "The label of every test event is predicted.",
        sampled=beyond.format_sampled_note(report),
        repeats=describe_repeats(report.get("data") or {}),
        forest=Markup(draw_forest_plot(headline_differences)) if headline_differences else "",
        differences=tables.build_difference_table(differences),
        calibration=beyond.build_calibration_table(report),
        calibration_note=beyond.CALIBRATION_NOTE,
        calibration_charts=[
            Markup(draw_reliability_chart(title, bins))
            for title, bins in beyond.list_calibration_charts(report)
        ],
        lists=beyond.build_list_table(report),
        lists_note=beyond.format_list_note(report),
        segments=beyond.build_segment_table(report),
        segments_note=beyond.format_segment_note(report),
        cold=beyond.build_cold_table(report),
        cold_note=beyond.format_cold_note(report),
        memory=beyond.build_memory_table(report),
        memory_note=beyond.format_memory_note(report),
        parts=beyond.build_part_table(report),
        parts_note=beyond.PART_NOTE,
        rewards=tables.build_reward_tables(report),
        steered=beyond.build_rl_tables(report),
        users=_collect_users(report),
        charts=[_render_chart(curve, nats_by_stage) for curve in drawn_curves if curve.important],
        more_charts=[_render_chart(curve, {}) for curve in drawn_curves if not curve.important],
        unread=unread,
        codebooks=tables.build_codebook_table(report),
        unique=(report.get("tokenizer") or {}).get("unique_before_collisions"),
        command=report.get("command"),
        made=tables.build_run_tables(report),
        scenario=scenario,
        notice=(report.get("data") or {}).get("notice"),
    )


@cache
def load_template(name: str) -> Template:
    """Load a template of this folder; it escapes every text that is inserted."""
    folder = Path(__file__).parent / "templates"
    return Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    ).get_template(name)


def _format_subtitle(report: Mapping[str, Any]) -> str:
    """Format the run's id, seed, data sizes and duration in one line."""
    data = report.get("data") or {}
    parts = [str(report["run"])] if report.get("run") else []
    if report.get("seed") is not None:
        parts.append(f"seed {report['seed']}")
    parts += [
        f"{data[key]:,} {key}" for key in ("users", "items", "events") if isinstance(data.get(key), int)
    ]
    total_s = (report.get("wall_s") or {}).get("total")
    if isinstance(total_s, int | float):
        parts.append(f"{int(total_s // 60)} min {int(total_s % 60):02d} s")
    return " · ".join(parts)


def _collect_users(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Collect the example users as parts.html shows them.

    Each one has its id, the newest titles of its history, the number of earlier events, the held-out titles, and
    the lists of each baseline and stage. An item of a list is (title, whether it was held out, whether the stage
    before did not recommend it).
    """
    stages, cards = report.get("stages") or {}, []
    for user in report.get("users") or []:
        target, history = _to_texts(user.get("target")), _to_texts(user.get("history"))
        lists, titles_before = [], None  # of the stage before
        for name, recommended in (user.get("recommended") or {}).items():
            titles = _to_texts(recommended)
            items = [
                (title, title in target, titles_before is not None and title not in titles_before)
                for title in titles
            ]
            lists.append((format_name(name), items))
            titles_before = titles if name in stages else titles_before
        cards.append(
            {
                "id": user.get("user_id", "?"),
                "earlier": max(0, len(history) - _SHOWN_HISTORY),
                "history": history[-_SHOWN_HISTORY:],
                "target": target,
                "lists": lists,
            }
        )
    return cards


def _to_texts(titles: Sequence[Any] | None) -> list[str]:
    """Return titles as texts; none for a missing list."""
    return [str(title) for title in titles or []]


def _render_chart(curve: Curve, nats_by_stage: Mapping[str, Sequence[tuple[float, float]]]) -> Markup:
    """Render the chart of a curve; the chart of a training loss also has the stage's validation loss in nats, dashed."""
    title = f"{format_name(curve.stage)} · {curve.name}" if curve.stage else curve.name
    validation_points = nats_by_stage.get(curve.stage, ()) if curve.name == "loss" else ()
    title += "; dashed: validation, next events only" if validation_points else ""
    is_unit_clear = curve.unit in ("1", "1/s") or curve.unit in curve.name
    steps, values = zip(*curve.points, strict=True)
    return Markup(
        draw_line_chart(title, steps, values, "" if is_unit_clear else curve.unit, validation_points)
    )
