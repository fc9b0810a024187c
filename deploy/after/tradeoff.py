"""`nonet tradeoff RUN KEY=0,0.1,0.3`: repeat an RL stage of a finished run for several values of a key.

Each value gives a point: a run that starts from the checkpoint from which the stage started, and that ends at the last step of
the stage. So the points differ only in the key. A point is chosen by validation: it has the highest value of the swept reward
among the points that keep a share `least` of the metric before the stage. Test events and held-out users are reported, but
not used for the choice.
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
from nonet.atomic import make_folder, write_whole
from nonet.controller.record import RunFolder, ValidationRecord, create_run, find_run
from nonet.controller.scenario import (
    is_above_floor,
    load_scenario,
    make_scenario,
    make_validation_rule,
    put_value,
)
from nonet.deploy.report import choose_ticks, format_ticks
from nonet.deploy.run import api
from nonet.errors import ConfigError
from nonet.plugins import PluginFiles

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 560, 340, 70, 50
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
        run: A folder, an id, a prefix, or `last`.
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
    path, values = _parse_sweep(sweep)
    stage, reward = _find_swept_reward(path, scenario)
    before = list(scenario.stages)[: list(scenario.stages).index(stage)]
    start = {"from": str(source.path), "stage": before[-1]} if before else None
    if start is None:
        raise ConfigError(
            f"tradeoff: {stage} is the first stage of {source.id}, so there is no checkpoint to start from"
        )
    folder = run_dir or create_run(f"{scenario.name}-tradeoff").path
    make_folder(folder)
    points = []
    for value in values:
        point_run = RunFolder((folder / f"{path.rsplit('.', 2)[-2]}-{value:g}").absolute())
        if point_run.read_json("report.json") is None:
            point_scenario = _make_point_scenario(source, scenario, stage, start, {path: value}, changes)
            if list(point_run.checkpoints.glob("step-*")):
                api.resume(point_run.path, scenario_file=point_scenario)
            else:
                api.run(point_scenario, run_dir=point_run.path, command=f"nonet tradeoff {run} {sweep}")
        points.append(_measure_point(point_run, stage, value))
    curve = _build_curve(points, path, reward, min_metric_share)
    write_whole(folder / "tradeoff.json", f"{json.dumps(curve, indent=1)}\n".encode())
    write_whole(folder / "tradeoff.svg", draw_curve(curve).encode())
    write_whole(folder / "report.html", _render_page(curve, source.id).encode())
    return folder, curve


def format_curve(curve: Mapping[str, Any]) -> str:
    """Format the curve as a table, with the chosen point."""
    metric, reward = curve["metric"], curve["reward"]
    head = f"{curve['key'].rsplit('.', 2)[-2]:>10}{reward:>14}{metric:>12}{'recall@10, test':>18}{reward + ', held out':>22}"
    lines = [f"{curve['key']}, by validation: {metric} before {curve['before']:.4f}", head]
    for point in curve["points"]:
        mark = " *" if point["value"] == curve["chosen"] else ""
        test, held = point["test"].get("recall@10"), point["held_out"].get(reward)
        lines.append(
            f"{point['value']:>10g}{point['rewards'][reward]:>14.4f}{point['metric']:>12.4f}"
            f"{test if test is not None else math.nan:>18.4f}{held[1] if held else math.nan:>22.4f}{mark}"
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
    """Describe which floors of a sweep held for users that RL never trained on, by the reports' criterion."""
    held = [
        f"{point['value']:g}"
        for point in curve["points"]
        if curve["reward"] in point["held_out"]
        and is_above_floor(point["held_out"][curve["reward"]][1], point["value"])
    ]
    return (
        f"floors held within 2 % for held-out users: {len(held)} of {len(curve['points'])}"
        f"{': ' if held else ''}{', '.join(held)}"
    )


def _parse_sweep(text: str) -> tuple[str, list[float]]:
    """Parse KEY=A,B,C into the key and sorted values. Raises ConfigError for fewer than two numbers."""
    path, equals, values = text.partition("=")
    try:
        numbers = sorted({float(value) for value in values.split(",")})
    except ValueError:
        numbers = []
    if not equals or len(numbers) < 2:
        raise ConfigError(
            f"tradeoff needs KEY=A,B,C with two numbers or more, such as stages.rl.rewards.novelty.weight=0,0.1,0.3; got {text!r}"
        )
    return path, numbers


def _find_swept_reward(path: str, scenario: Any) -> tuple[str, str]:
    """Return the (stage, reward) of a key. Raises ConfigError if the key cannot be swept or the reward does not exist."""
    parts = path.split(".")
    if (
        len(parts) != 5
        or parts[0] != "stages"
        or parts[2] != "rewards"
        or parts[4] not in ("weight", "at_least")
    ):
        raise ConfigError(
            f"tradeoff: {path} cannot be swept; only weights and floors can: stages.<stage>.rewards.<name>.weight or .at_least"
        )
    stage, reward = parts[1], parts[3]
    body = scenario.stages.get(stage)
    if body is None or reward not in getattr(body, "rewards", {}):
        known = [
            f"stages.{name}.rewards.{each}"
            for name, one in scenario.stages.items()
            for each in getattr(one, "rewards", {})
        ]
        raise ConfigError(
            f"tradeoff: the run has no {'.'.join(parts[:4])}; it has {', '.join(known) or 'no rewards'}"
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
    """Make the scenario of one point: only the stage, from its initial checkpoint to its end."""
    document = scenario.model_dump(mode="python", exclude_none=True, by_alias=True)
    document["stages"] = {stage: document["stages"][stage]}
    document["init"] = dict(start)
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
    """Measure a point.

    The result has rewards and metric of validation at the selected step, those of test events and held-out
    users, and the metric before the stage.
    """
    scenario, _ = load_scenario(run.scenario)
    rule, kept = make_validation_rule(scenario, stage), ValidationRecord(run, stage)
    assert rule is not None
    assert kept.end is not None
    step = kept.end["best"]
    entry = next(each for each in kept.history if each["step"] == step)
    rewards: dict[str, float] = {}
    for line in run.metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        name = record["name"].partition("validation reward.")[2]
        if name and record["stage"] == stage and record["step"] == step:
            rewards[name] = record["value"]
    report = run.read_json("report.json") or {}

    def get_metric(answer: Mapping[str, Any]) -> float:
        """Return the metric of a validation."""
        return answer["nats"] if rule.metric == "nats" else answer["metrics"][rule.metric]

    return {
        "value": value,
        "step": step,
        "rewards": rewards,
        "metric": get_metric(entry),
        "before": get_metric(kept.start) if kept.start else math.nan,
        "name": rule.metric,
        "lower": rule.lower,
        "test": report["stages"][stage],
        "held_out": report.get("rewards", {}),
    }


def _build_curve(points: Sequence[dict[str, Any]], path: str, reward: str, least: float) -> dict[str, Any]:
    """Build the curve from its points, and choose one."""
    before, lower = points[0]["before"], points[0]["lower"]
    kept = [
        point
        for point in points
        if (point["metric"] * least <= before if lower else point["metric"] >= least * before)
    ]
    best = max(kept, key=lambda point: point["rewards"][reward], default=None)
    given = [point["rewards"][reward] for point in points]
    return {
        "key": path,
        "reward": reward,
        "metric": points[0]["name"],
        "before": before,
        "least": least,
        "chosen": best and best["value"],
        "monotone": all(a < b for a, b in pairwise(given)),
        "points": list(points),
    }


def draw_curve(curve: Mapping[str, Any]) -> str:
    """Draw reward against metric as one SVG file: one dot per point, the required metric dashed, the chosen dot green."""
    points, reward = curve["points"], curve["reward"]
    xs, ys = [point["rewards"][reward] for point in points], [point["metric"] for point in points]
    floor = curve["least"] * curve["before"]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(*ys, floor), max(*ys, curve["before"])
    wide, high = (high_x - low_x) or 1.0, (high_y - low_y) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        right, top = _WIDTH - _LEFT - 50, _HEIGHT - _BOTTOM - 50
        return round(_LEFT + 20 + (x - low_x) / wide * right, 1), round(30 + (high_y - y) / high * top, 1)

    parts = []
    for y, text in zip(choose_ticks(low_y, high_y), format_ticks(choose_ticks(low_y, high_y)), strict=True):
        at = place(low_x, y)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{text}</text>')
    for x, text in zip(choose_ticks(low_x, high_x), format_ticks(choose_ticks(low_x, high_x)), strict=True):
        parts.append(
            f'<text class="tick" x="{place(x, low_y)[0]}" y="{_HEIGHT - 28}" text-anchor="middle">{text}</text>'
        )
    at = place(low_x, floor)[1]
    parts.append(f'<line class="floor" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{at}" y2="{at}"/>')
    parts.append(
        f'<text class="tick" x="{_WIDTH - 20}" y="{at - 5}" text-anchor="end">{curve["least"]:.0%} of before</text>'
    )
    line = " ".join(f"{x},{y}" for x, y in map(place, xs, ys))
    parts.append(f'<polyline class="line" points="{line}"/>')
    for point, x, y in zip(points, xs, ys, strict=True):
        across, down = place(x, y)
        kind = "best" if point["value"] == curve["chosen"] else "dot"
        parts.append(f'<circle class="{kind}" cx="{across}" cy="{down}" r="5"/>')
        parts.append(f'<text x="{across + 8}" y="{down - 6}">{point["value"]:g}</text>')
    title = escape(
        f"{curve['metric']} of validation against {reward}, by {curve['key'].rsplit('.', 2)[-2]}'s weight"
    )
    parts.append(f'<text class="head" x="{_LEFT}" y="16">{title}</text>')
    parts.append(
        f'<text class="tick" x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(reward)}, mean per beam</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _render_page(curve: Mapping[str, Any], run: str) -> str:
    """Render the page of a curve."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(curve["key"])}</title>'
        f"<h1>Trade-off of {escape(run)}</h1>{draw_curve(curve)}<pre>{escape(format_curve(curve))}</pre></html>\n"
    )
