"""The verdict of a report: sentences that describe the results of a run.

A difference is called better or worse only if the 95 % interval of the paired bootstrap excludes 0.
Otherwise it is called not significant, whatever its size. The change of a reward without an interval is
reported for the measured prompts only, without a claim of significance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nonet.controller.scenario.settings import describe_duplicates, describe_repeats, describe_shared_codes
from nonet.deploy.report.scores import (
    Difference,
    format_name,
    format_number,
    iterate_differences,
    select_headline_metrics,
    select_scores,
)
from nonet.deploy.report.validations import describe_validations


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of the verdict.

    Attributes:
        text: The sentence.
        tone: 1 for good news, 0 for neutral, -1 for bad news.
    """

    text: str
    tone: int


def get_verdict(report: Mapping[str, Any]) -> list[str]:
    """Return the sentences of all findings, most important first; the list is never empty."""
    return [finding.text for finding in collect_findings(report)]


def collect_findings(report: Mapping[str, Any]) -> list[Finding]:
    """Collect the findings of a report, most important first.

    The order is: comparisons of stages with baselines and with one another, rewards of RL, limits of the
    data, validation, and repeated items.
    """
    if not report.get("stages"):
        return [Finding("No stage has been evaluated, so there is nothing to compare.", 0)]
    comparisons = _compare_subjects(report) or [_list_scores(report)]
    validations = [Finding(*fields) for fields in describe_validations(report)]
    return (
        comparisons
        + _describe_rewards(report)
        + _describe_reranking(report)
        + _find_reward_hacking(report)
        + _describe_left_out(report)
        + _find_data_limits(report)
        + validations
        + _describe_repeats(report)
    )


def _compare_subjects(report: Mapping[str, Any]) -> list[Finding]:
    """Compare stages with baselines and with one another, one finding for each selected pair."""
    metrics = select_headline_metrics(report)
    if not metrics:
        return []
    by_pair: dict[tuple[str, str], dict[str, Difference]] = {}
    for difference in iterate_differences(report):
        by_pair.setdefault((difference.left, difference.right), {})[difference.metric] = difference
    stages, comparisons = list(report.get("stages") or {}), []
    for pair in _select_pairs(report, list(by_pair)):
        shown = [by_pair[pair][metric] for metric in metrics if metric in by_pair[pair]]
        if shown:
            comparisons.append(_describe_comparison(report, shown, against_stage=pair[1] in stages))
    return comparisons


def _select_pairs(report: Mapping[str, Any], pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Select the comparisons for the verdict; the section on comparisons of the report lists all of them.

    Selected are: the last stage before RL against every baseline, every stage against the one before it,
    and the last stage against the strongest baseline. Pairs that name other subjects were requested by the
    user and are always included.
    """
    stages, baselines = list(report.get("stages") or {}), list(report.get("baselines") or {})
    focus = next((name for name in reversed(stages) if name != "rl"), stages[-1])
    chosen = [(focus, baseline) for baseline in baselines]
    chosen += list(pairwise(reversed(stages)))[::-1]
    chosen += [(stages[-1], name) for name in find_strongest_baseline(report, baselines)]
    known = {*stages, *baselines}
    chosen += [pair for pair in pairs if not set(pair) <= known]
    return [pair for pair in dict.fromkeys(chosen) if pair in pairs] or pairs


def find_strongest_baseline(report: Mapping[str, Any], baselines: list[str]) -> list[str]:
    """Return a list with the name of the best baseline by the first headline metric; empty if there is none."""
    metric = select_headline_metrics(report)[0]
    scores = {row.name: row.scores.get(metric, 0.0) for row in select_scores(report) if row.name in baselines}
    return [max(scores, key=lambda name: scores[name])] if scores else []


def _describe_comparison(
    report: Mapping[str, Any], shown: list[Difference], *, against_stage: bool
) -> Finding:
    """Describe the difference between two subjects; the first metric decides the wording."""
    first, *others = shown
    left, right = format_name(first.left), format_name(first.right)
    same = f"{left} against {right}: the difference is not significant"
    if first.left == "rl" and against_stage:
        words = {1: f"RL improves on {right}", -1: f"RL is worse than {right}"}
        same = f"RL made no significant difference against {right}"
    elif against_stage:
        words = {1: f"{left} improves on {right}", -1: f"{left} is worse than {right}"}
    else:
        words = {1: f"{left} beats {right}", -1: f"{left} loses to {right}"}
    text = f"{words.get(first.direction, same)}: {_format_evidence(report, first)}"
    for other in others:
        if other.direction != first.direction:
            text += f"; in {other.metric} the difference {_describe_significance(other)} ({_format_interval(other)})"
    return Finding(f"{text[0].upper()}{text[1:]}.", first.direction)


def _format_evidence(report: Mapping[str, Any], difference: Difference) -> str:
    """Format both scores of a difference, their ratio if it is large, and the interval."""
    scores = {row.name: row.scores.get(difference.metric) for row in select_scores(report)}
    left, right = scores.get(difference.left), scores.get(difference.right)
    if left is None or right is None:
        return f"{difference.metric} {_format_interval(difference)}"
    times = f", {left / right:.1f} times as much" if right > 0 and left / right >= 1.5 else ""
    return f"{difference.metric} {format_number(left)} against {format_number(right)}{times} ({_format_interval(difference)})"


def _format_interval(difference: Difference) -> str:
    low, high = format_number(difference.low, sign=True), format_number(difference.high, sign=True)
    return f"{format_number(difference.diff, sign=True)}, 95 % interval {low} to {high}"


def _describe_significance(difference: Difference) -> str:
    return {1: "is significant and up", -1: "is significant and down"}.get(
        difference.direction, "is not significant"
    )


def _list_scores(report: Mapping[str, Any]) -> Finding:
    """List the scores of all stages if no pairs were compared."""
    rows = select_scores(report)
    metric = next(iter(select_headline_metrics(report)), None)
    if metric is None:
        return Finding("The stages have no scores, so there is nothing to compare.", 0)
    scores = ", ".join(f"{format_name(row.name)} {format_number(row.scores.get(metric))}" for row in rows)
    return Finding(f"{metric}: {scores}. No pairs were compared, so no stage is called better.", 0)


def _describe_rewards(report: Mapping[str, Any]) -> list[Finding]:
    """Describe how each reward changed during RL."""
    rewards = {name: list(values) for name, values in (report.get("rewards") or {}).items()}
    rewards = {name: values for name, values in rewards.items() if _is_finite_pair(values[:2])}
    if not rewards:
        return []
    on, _, _ = str(report.get("rewards_on") or "").partition(";")
    where = f" on {on}" if on else ""
    total = rewards.pop("total", None)
    parts = [f"{format_name(name)} {_describe_change(values)}" for name, values in rewards.items()]
    if total is None:
        return [Finding(f"Rewards{where}: {'; '.join(parts)}.", 0)]
    text = f"The trained reward {_describe_change(total)}{where}"
    return [Finding(f"{text}{': ' if parts else ''}{'; '.join(parts)}.", get_reward_direction(total))]


def _find_reward_hacking(report: Mapping[str, Any]) -> list[Finding]:
    """Find stages whose trained reward rose while their held-out metrics fell, which is reward hacking."""
    findings, stages = [], list(report.get("stages") or {})
    for name, part in (report.get("stage_rewards") or {}).items():
        total = list((part.get("rewards") or {}).get("total") or [])
        before = stages[stages.index(name) - 1] if name in stages and stages.index(name) else None
        if len(total) < 2 or get_reward_direction(total) <= 0 or before is None:
            continue
        worse = [
            d
            for d in iterate_differences(report)
            if (d.left, d.right) == (name, before)
            and d.direction < 0
            and d.metric in select_headline_metrics(report)
        ]
        if worse:
            evidence = "; ".join(f"{d.metric} {_format_interval(d)}" for d in worse)
            findings.append(
                Finding(
                    f"Reward hacking in {format_name(name)}: the trained reward {_describe_change(total)} "
                    f"while held-out metrics fell against {format_name(before)}: {evidence}.",
                    -1,
                )
            )
    return findings


def _describe_reranking(report: Mapping[str, Any]) -> list[Finding]:
    """Describe how re-ranking the start of an RL stage by its rewards compares with training."""
    findings = []
    metric = next(iter(select_headline_metrics(report)), None)
    baselines, stages = report.get("baselines") or {}, report.get("stages") or {}
    for name, part in (report.get("stage_rewards") or {}).items():
        rerank, lists = part.get("rerank"), baselines.get(f"{name}_rerank") or {}
        if not rerank:
            continue
        text = (
            f"Re-ranking the start of {format_name(name)} by the same rewards, without training (multiplier "
            f"{format_number(rerank['multiplier'])} nats): the trained reward {_describe_change(list(rerank['total']))}"
        )
        if metric in lists and metric in stages.get(name, {}):
            stage_score = format_number(stages[name][metric])
            text += f"; {metric} {format_number(lists[metric])} against {stage_score} of {format_name(name)}"
        findings.append(Finding(f"{text}.", 0))
    return findings


def _describe_left_out(report: Mapping[str, Any]) -> list[Finding]:
    """Describe the prompts that were left out because a reward gave no score, and the floors of rewards."""
    findings = [
        Finding(
            f"Reward {name} gave no score to {each['prompts']:,} prompts in {each['steps']:,} steps, which were left out: "
            f"{each['why']}",
            -1,
        )
        for name, each in (report.get("quarantined") or {}).items()
    ]
    for name, each in (report.get("floors") or {}).items():
        words = "held" if each["held"] else "was not held"
        before, after = each.get("held_out") or (None, None)
        shown = f"{format_number(each['mean'])} in the last {each['steps']} steps"
        if after is not None:
            shown = f"{format_number(after)} for users that RL never trained on ({format_number(before)} before), {shown}"
        findings.append(
            Finding(
                f"The floor of {name} {words}: at least {format_number(each['at_least'])}; {shown} (multiplier "
                f"{format_number(each['multiplier'])}).",
                1 if each["held"] else -1,
            )
        )
    return findings


def _find_data_limits(report: Mapping[str, Any]) -> list[Finding]:
    """Describe properties of the data or of the semantic ids that limit what the scores mean."""
    data, tokenizer = report.get("data") or {}, report.get("tokenizer") or {}
    texts = (describe_duplicates(data), describe_shared_codes(tokenizer, data.get("items", 0)))
    return [Finding(text, -1) for text in texts if text]


def _describe_repeats(report: Mapping[str, Any]) -> list[Finding]:
    data = report.get("data") or {}
    text = describe_repeats(data)
    return [Finding(text, 0)] if text and any(data["repeats"]["share"].values()) else []


def get_reward_direction(values: list[float]) -> int:
    """Return 1, 0 or -1 for a reward that rose, did not change or fell.

    Args:
        values: [before, after], or [before, after, low, high] with the 95 % interval of the difference.
    """
    before, after, *interval = values
    if len(interval) == 2 and _is_finite_pair(interval):
        return int(interval[0] > 0) - int(interval[1] < 0)
    return int(after > before) - int(after < before)


def choose_reward_digits(values: list[float]) -> int:
    """Return the number of decimals that shows a change: four, or six if both means are below 0.01."""
    return 4 if max(abs(value) for value in values[:2]) >= 0.01 else 6


def _describe_change(values: list[float]) -> str:
    """Describe the change of a reward from [before, after] or [before, after, low, high]."""
    digits = choose_reward_digits(values)
    before, after, *interval = values
    if len(interval) == 2 and get_reward_direction(values) == 0:
        low, high = (format_number(bound, digits, sign=True) for bound in interval)
        span = f"{format_number(before, digits)} to {format_number(after, digits)}"
        return f"did not change significantly ({span}, 95 % interval {low} to {high})"
    if format_number(before, digits) == format_number(after, digits):
        return f"stayed at {format_number(after, digits)}"
    verb = "rose" if after > before else "fell"
    share = f" ({format_number(100 * (after / before - 1), 0, sign=True)} %)" if before > 0 else ""
    return f"{verb} from {format_number(before, digits)} to {format_number(after, digits)}{share}"


def _is_finite_pair(values: list[Any]) -> bool:
    return len(values) == 2 and all(
        isinstance(value, int | float) and math.isfinite(value) for value in values
    )
