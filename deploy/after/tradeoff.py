"""`nonet tradeoff RUN KEY=0,0.1,0.3`: repeat an RL stage of a finished run for several values of a key.

Each value gives a point: a run that starts from the checkpoint from which the stage started, and that ends at the last step of
the stage. So the points differ only in the key. The point that is chosen has the highest value of the swept reward in
validation among the points whose validation metric is at least a given share of its value before the stage. Test events and
held-out users are reported, but not used for the choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from nonet import yaml
from nonet.atomic import make_folder, open_file, write_whole
from nonet.controller.record import RunFolder, ValidationRecord, check_no_storage, create_run, find_run
from nonet.controller.scenario import (
    ValidationRule,
    check_supported,
    is_above_floor,
    load_scenario,
    make_scenario,
    make_validation_rule,
    put_value,
)
from nonet.controller.setup import get_scenario_folder, resolve_paths
from nonet.deploy.report import choose_ticks, format_ticks
from nonet.deploy.run import api
from nonet.errors import ConfigError, NonetError
from nonet.plugins import PluginFiles
from nonet.trust import check_folder

_WIDTH, _HEIGHT, _LEFT_MARGIN, _BOTTOM_MARGIN = 560, 340, 70, 50  # of the picture, in pixels
_STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif } text { fill: #1a1f27 } .tick { fill: #5d6673; font-size: 11px }
.grid { stroke: #dfe3e8 } .line { fill: none; stroke: #2459c4; stroke-width: 2 } .dot { fill: #2459c4 }
.best { fill: #14713f } .floor { stroke: #b3261e; stroke-dasharray: 4 3 } .head { font-weight: 600 }
"""


def run_tradeoff(
    run: str,
    sweep: str,
    *,
    run_dir: Path | None = None,
    min_metric_share: float = 0.98,
    changes: Sequence[str] = (),
) -> tuple[Path, dict[str, Any]]:
    """Run the points of a sweep, except those that are finished in the folder, and choose one of them.

    Args:
        run: The run's folder, its id, a prefix of its id, or `last`.
        sweep: The key and its values, as KEY=A,B,C.
        run_dir: The folder of the points, by default a new one.
        min_metric_share: Share of the metric before the stage that the chosen point must keep.
        changes: Changes of keys for all points, each "a.b=c".

    Returns:
        The folder, and the curve of all points, which is also written to tradeoff.json, tradeoff.svg and report.html.

    Raises:
        ConfigError: The key cannot be swept, or the stage is not validated.
    """
    source = find_run(run)
    scenario, _ = load_scenario(source.scenario)
    check_supported(scenario, "tradeoff", source.id)
    check_folder(source.path, source.id)
    key, values = _parse_sweep(sweep)
    stage, reward = _find_swept_reward(key, scenario)
    earlier_stages = list(scenario.stages)[: list(scenario.stages).index(stage)]
    if not earlier_stages:
        raise ConfigError(
            f"tradeoff: {stage} is the first stage of {source.id}, so there is no checkpoint to start from"
        )
    start = {"from": str(source.path), "stage": earlier_stages[-1]}
    point_scenarios = {
        value: _make_point_scenario(source, scenario, stage, start, {key: value}, changes) for value in values
    }
    for point_scenario in point_scenarios.values():
        storage = point_scenario.scenario.storage
        check_no_storage(storage and storage.url, "tradeoff")
    folder = run_dir or create_run(f"{scenario.name}-tradeoff").path
    make_folder(folder)
    points = []
    for value, point_scenario in point_scenarios.items():
        point_run = RunFolder((folder / f"{_get_reward_name(key)}-{value:g}").absolute())
        if point_run.read_json("report.json") is None:
            if list(point_run.checkpoints.glob("step-*")):
                api.resume(point_run.path, scenario_file=point_scenario)
            else:
                api.run(point_scenario, run_dir=point_run.path, command=f"nonet tradeoff {run} {sweep}")
        points.append(_measure_point(point_run, stage, value))
    curve = _build_curve(points, key, reward, min_metric_share)
    write_whole(folder / "tradeoff.json", f"{json.dumps(curve, indent=1)}\n".encode())
    write_whole(folder / "tradeoff.svg", draw_curve(curve).encode())
    write_whole(folder / "report.html", _render_page(curve, source.id).encode())
    return folder, curve


def format_curve(curve: Mapping[str, Any]) -> str:
    """Format the curve of `run_tradeoff` as a table, in which the chosen point is marked."""
    metric, reward = curve["metric"], curve["reward"]
    head = f"{_get_reward_name(curve['key']):>10}{reward:>14}{metric:>12}{'recall@10, test':>18}{reward + ', held out':>22}"
    lines = [f"{curve['key']}, by validation: {metric} before {curve['before']:.4f}", head]
    for point in curve["points"]:
        mark = " *" if point["value"] == curve["chosen"] else ""
        test_recall = point["test"].get("recall@10")
        held_out = point["held_out"].get(reward)  # before and after the stage
        lines.append(
            f"{point['value']:>10g}{point['rewards'][reward]:>14.4f}{point['metric']:>12.4f}"
            f"{test_recall if test_recall is not None else math.nan:>18.4f}{held_out[1] if held_out else math.nan:>22.4f}{mark}"
        )
    lines.append(
        f"* chosen on validation: the highest {reward} with at least {curve['least']:.0%} of {metric} kept"
        if curve["chosen"] is not None
        else f"no point keeps {curve['least']:.0%} of {metric}"
    )
    lines.append(
        _describe_kept_floors(curve) if curve["key"].endswith(".at_least") else _describe_monotonicity(curve)
    )
    return "\n".join(lines)


def _describe_monotonicity(curve: Mapping[str, Any]) -> str:
    """Describe whether the reward rises with its weight."""
    return f"{curve['reward']} {'rises' if curve['monotone'] else 'does not rise'} with its weight at every point"


def _describe_kept_floors(curve: Mapping[str, Any]) -> str:
    """List the floors of a sweep that the reward kept for users that RL never trained on, as in reports."""
    kept_floors = [
        f"{point['value']:g}"
        for point in curve["points"]
        if curve["reward"] in point["held_out"]
        and is_above_floor(point["held_out"][curve["reward"]][1], point["value"])
    ]
    return (
        f"floors held within 2 % for held-out users: {len(kept_floors)} of {len(curve['points'])}"
        f"{': ' if kept_floors else ''}{', '.join(kept_floors)}"
    )


def _get_reward_name(key: str) -> str:
    """Return the name of the reward in a swept key, stages.<stage>.rewards.<name>.weight or .at_least."""
    return key.rsplit(".", 2)[-2]


def _parse_sweep(text: str) -> tuple[str, list[float]]:
    """Parse KEY=A,B,C into the key and sorted values. Raises ConfigError for fewer than two numbers."""
    key, equals_sign, values = text.partition("=")
    try:
        numbers = sorted({float(value) for value in values.split(",")})
    except ValueError:
        numbers = []
    if not equals_sign or len(numbers) < 2:
        raise ConfigError(
            f"tradeoff needs KEY=A,B,C with two numbers or more, such as stages.rl.rewards.novelty.weight=0,0.1,0.3; got {text!r}"
        )
    return key, numbers


def _find_swept_reward(key: str, scenario: Any) -> tuple[str, str]:
    """Return the names (stage, reward) in a key. Raises ConfigError if it cannot be swept or the reward does not exist."""
    parts = key.split(".")
    if (
        len(parts) != 5
        or parts[0] != "stages"
        or parts[2] != "rewards"
        or parts[4] not in ("weight", "at_least")
    ):
        raise ConfigError(
            f"tradeoff: {key} cannot be swept; only weights and floors can: stages.<stage>.rewards.<name>.weight or .at_least"
        )
    stage, reward = parts[1], parts[3]
    stage_options = scenario.stages.get(stage)
    if stage_options is None or reward not in getattr(stage_options, "rewards", {}):
        known_rewards = [
            f"stages.{name}.rewards.{known_reward}"
            for name, options in scenario.stages.items()
            for known_reward in getattr(options, "rewards", {})
        ]
        raise ConfigError(
            f"tradeoff: the run has no {'.'.join(parts[:4])}; it has {', '.join(known_rewards) or 'no rewards'}"
        )
    if make_validation_rule(scenario, stage) is None:
        raise ConfigError(
            f"tradeoff: stages.{stage} is not validated; it needs data.split.valid, and best: other than last"
        )
    return stage, reward


def _make_point_scenario(
    source: RunFolder,
    scenario: Any,
    stage: str,
    start: Mapping[str, str],
    values: Mapping[str, Any],
    changes: Sequence[str],
) -> api.ScenarioFile:
    """Make the scenario of one point: only the stage, from its initial checkpoint to its end.

    Args:
        source: The finished run.
        scenario: The finished run's scenario.
        stage: The stage to repeat.
        start: The scenario key `init`: the run and the stage whose checkpoint the stage starts from.
        values: The point's values by key.
        changes: Changes of keys for all points, each "a.b=c".
    """
    document = scenario.model_dump(mode="python", exclude_none=True, by_alias=True)
    document["stages"] = {stage: document["stages"][stage]}
    document["init"] = dict(start)
    resolve_paths(get_scenario_folder(source), scenario, document)
    document.pop("settings", None)
    put_value(document, f"stages.{stage}.best", {"by": "last"}, "tradeoff")
    put_value(document, f"stages.{stage}.control", False, "tradeoff")  # --set may override all of these
    put_value(document, "evaluate.baselines", [{"use": "popularity"}], "tradeoff")
    for change in changes:
        path, _, text = change.partition("=")
        put_value(document, path.strip(), yaml.parse(text, f"--set {path}"), f"--set {path}")
    for path, value in values.items():
        put_value(document, path, value, "tradeoff")
    return api.ScenarioFile(
        make_scenario(document, scenario.name, PluginFiles(str(source.sources))), source.sources
    )


def _measure_point(run: RunFolder, stage: str, value: float) -> dict[str, Any]:
    """Return the point of a finished run, as tradeoff.json lists it.

    It has rewards and metric of validation at the selected step, the metric of validation before the stage, and
    the scores of test events and held-out users.
    """
    scenario, _ = load_scenario(run.scenario)
    rule, validations = make_validation_rule(scenario, stage), ValidationRecord(run, stage)
    assert rule is not None
    if validations.end is None:
        raise NonetError(
            f"{run.id} has ended before its stage {stage}; run the command again, which goes on from there"
        )
    step = validations.end["best"]
    selected = next(validation for validation in validations.history if validation["step"] == step)
    rewards: dict[str, float] = {}
    with open_file(run.metrics) as lines:
        for line in lines:
            record = json.loads(line)
            name = record["name"].partition("validation reward.")[2]
            if name and record["stage"] == stage and record["step"] == step:
                rewards[name] = record["value"]
    report = run.read_json("report.json") or {}

    def get_metric(validation: Mapping[str, Any]) -> float:
        """Return the metric that the rule reads from a validation."""
        return validation["nats"] if rule.metric == "nats" else validation["metrics"][rule.metric]

    return {
        "value": value,
        "step": step,
        "rewards": rewards,
        "metric": get_metric(selected),
        "before": get_metric(validations.start) if validations.start else math.nan,
        "name": rule.metric,
        "lower": rule.lower,
        "test": report["stages"][stage],
        "held_out": report.get("rewards", {}),
    }


def _build_curve(
    points: Sequence[dict[str, Any]], key: str, reward: str, min_metric_share: float
) -> dict[str, Any]:
    """Build the curve from its points in ascending order of their values, and choose one."""
    before, lower_is_better = points[0]["before"], points[0]["lower"]
    required = before / min_metric_share if lower_is_better else before * min_metric_share
    rule = ValidationRule(points[0]["name"], lower_is_better, least=min_metric_share)
    eligible_points = [point for point in points if rule.is_metric_kept(point["metric"], before)]
    best_point = max(eligible_points, key=lambda point: point["rewards"][reward], default=None)
    scores = [point["rewards"][reward] for point in points]
    return {
        "key": key,
        "reward": reward,
        "metric": points[0]["name"],
        "before": before,
        "least": min_metric_share,
        "required": required,
        "chosen": best_point and best_point["value"],
        "monotone": all(score < next_score for score, next_score in pairwise(scores)),
        "points": list(points),
    }


def draw_curve(curve: Mapping[str, Any]) -> str:
    """Draw the metric (y) against the reward (x) as the text of an SVG file.

    It has one dot per point, a dashed line for the required metric, and the chosen point in green.
    """
    points, reward = curve["points"], curve["reward"]
    xs, ys = [point["rewards"][reward] for point in points], [point["metric"] for point in points]
    required_y = curve["required"]
    low_x, high_x = min(xs), max(xs)
    low_y, high_y = min(*ys, required_y), max(*ys, required_y, curve["before"])
    range_x, range_y = (high_x - low_x) or 1.0, (high_y - low_y) or 1.0

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        plot_width, plot_height = _WIDTH - _LEFT_MARGIN - 50, _HEIGHT - _BOTTOM_MARGIN - 50
        pixel_x = _LEFT_MARGIN + 20 + (x - low_x) / range_x * plot_width
        pixel_y = 30 + (high_y - y) / range_y * plot_height  # pixels count from the top
        return round(pixel_x, 1), round(pixel_y, 1)

    parts = []
    for y, text in zip(choose_ticks(low_y, high_y), format_ticks(choose_ticks(low_y, high_y)), strict=True):
        _, down = to_pixels(low_x, y)
        parts.append(f'<line class="grid" x1="{_LEFT_MARGIN}" x2="{_WIDTH - 20}" y1="{down}" y2="{down}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT_MARGIN - 6}" y="{down + 4}" text-anchor="end">{text}</text>'
        )
    for x, text in zip(choose_ticks(low_x, high_x), format_ticks(choose_ticks(low_x, high_x)), strict=True):
        across, _ = to_pixels(x, low_y)
        parts.append(f'<text class="tick" x="{across}" y="{_HEIGHT - 28}" text-anchor="middle">{text}</text>')
    _, down = to_pixels(low_x, required_y)
    parts.append(f'<line class="floor" x1="{_LEFT_MARGIN}" x2="{_WIDTH - 20}" y1="{down}" y2="{down}"/>')
    parts.append(
        f'<text class="tick" x="{_WIDTH - 20}" y="{down - 5}" text-anchor="end">required: {required_y:.4g}</text>'
    )
    line = " ".join(f"{across},{down}" for across, down in map(to_pixels, xs, ys))
    parts.append(f'<polyline class="line" points="{line}"/>')
    for point, x, y in zip(points, xs, ys, strict=True):
        across, down = to_pixels(x, y)
        css_class = "best" if point["value"] == curve["chosen"] else "dot"
        parts.append(f'<circle class="{css_class}" cx="{across}" cy="{down}" r="5"/>')
        parts.append(f'<text x="{across + 8}" y="{down - 6}">{point["value"]:g}</text>')
    title = escape(
        f"{curve['metric']} of validation against {reward}, by {_get_reward_name(curve['key'])}'s weight"
    )
    parts.append(f'<text class="head" x="{_LEFT_MARGIN}" y="16">{title}</text>')
    parts.append(
        f'<text class="tick" x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(reward)}, mean per beam</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _render_page(curve: Mapping[str, Any], run_id: str) -> str:
    """Render the HTML page with the picture and the table of a curve."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(curve["key"])}</title>'
        f"<h1>Trade-off of {escape(run_id)}</h1>{draw_curve(curve)}<pre>{escape(format_curve(curve))}</pre></html>\n"
    )
