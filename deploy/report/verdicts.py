"""The verdict of a report: sentences that describe the results of a run.

A subject (a stage or a baseline) is called better or worse than another one only if the 95 % interval of their paired
difference, from a bootstrap, excludes 0. Otherwise the difference is called not significant, whatever its size. The
change of a reward without an interval is reported for the measured prompts only, without a claim of significance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nonet.controller.scenario.settings import (
    describe_duplicates,
    describe_lost_labels,
    describe_repeats,
    describe_shared_codes,
    describe_unknown_items,
    has_many_lost_labels,
)
from nonet.deploy.report.scores import (
    Difference,
    format_name,
    format_number,
    is_lower_better,
    iterate_differences,
    list_compared_tasks,
    select_headline_metrics,
    select_scores,
)
from nonet.deploy.report.validations import describe_validations

# A memory with this weight l or more, that follows the model by the exponent b or less, keeps RL from changing the lists much.
_LARGE_MEMORY, _LOOSE_MEMORY = 0.3, 0.25


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

    The order is: comparisons of stages with baselines and with one another, the memory, rewards of RL, limits of the
    data, validation, repeated items, interruptions, isolated
    nodes, and trackers that lack metrics.
    """
    if not report.get("stages"):
        return [Finding("No stage has been evaluated, so there is nothing to compare.", tone=0)]
    comparisons = _compare_subjects(report) or [_list_scores(report)]
    validations = [Finding(*fields) for fields in describe_validations(report)]
    return (
        comparisons
        + _describe_memory(report)
        + _describe_rewards(report)
        + _describe_reranking(report)
        + _describe_memory_in_rl(report)
        + _find_reward_hacking(report)
        + _describe_unscored_prompts(report)
        + _describe_floors(report)
        + _find_data_limits(report)
        + validations
        + _describe_repeats(report)
        + _describe_interruptions(report)
        + _describe_isolations(report)
        + _describe_trackers(report)
    )


def _compare_subjects(report: Mapping[str, Any]) -> list[Finding]:
    """Compare stages with baselines and with one another, one finding for each selected pair."""
    metrics = select_headline_metrics(report)
    if not metrics:
        return []
    differences_by_pair: dict[tuple[str, str], dict[str, Difference]] = {}
    for difference in iterate_differences(report):
        by_metric = differences_by_pair.setdefault((difference.left, difference.right), {})
        by_metric[difference.metric] = difference
    stages, comparisons = list(report.get("stages") or {}), []
    for pair in _select_pairs(report, list(differences_by_pair)):
        by_metric = differences_by_pair[pair]
        for task in ("", *list_compared_tasks(report)):
            names = [f"{metric}@{task}" if task else metric for metric in metrics]
            differences = [by_metric[name] for name in names if name in by_metric]
            if differences:
                comparisons.append(_describe_comparison(report, differences, against_stage=pair[1] in stages))
    return comparisons


def _select_pairs(report: Mapping[str, Any], pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Select the pairs of subjects that the verdict compares; the report's own section compares all of them.

    Selected are: the last stage before RL against every baseline, every stage against the one before it,
    and the last stage against the strongest baseline. Pairs that name other subjects were requested by the
    user and are always included.

    Returns:
        The selected ones of `pairs`; all of them if none is selected.
    """
    stages, baselines = list(report.get("stages") or {}), list(report.get("baselines") or {})
    last_before_rl = next((name for name in reversed(stages) if name != "rl"), stages[-1])
    selected = [(last_before_rl, baseline) for baseline in baselines]
    selected += list(pairwise(reversed(stages)))[::-1]  # (stage, the one before it), first stages first
    selected += [(stages[-1], name) for name in find_strongest_baseline(report, baselines)]
    evaluated = {*stages, *baselines}
    selected += [pair for pair in pairs if not set(pair) <= evaluated]
    return [pair for pair in dict.fromkeys(selected) if pair in pairs] or pairs


def find_strongest_baseline(report: Mapping[str, Any], baselines: list[str]) -> list[str]:
    """Return a list with the name of the baseline with the best first headline metric; empty if there is none."""
    metric = next(iter(select_headline_metrics(report)), None)  # None if no metric is defined
    rows = [row for row in select_scores(report) if row.name in baselines and metric in row.scores]
    if metric is None or not rows:
        return []
    select_best = min if is_lower_better(report, metric) else max
    return [select_best(rows, key=lambda row: row.scores[metric]).name]


def _describe_comparison(
    report: Mapping[str, Any], differences: list[Difference], *, against_stage: bool
) -> Finding:
    """Describe the differences between two subjects, one per metric; the first metric decides the wording.

    If it is not significant and another one is, neither wording holds for both, and each difference is described.
    """
    first, *others = differences
    left, right = format_name(first.left), format_name(first.right)
    no_difference = f"{left} against {right}: the difference is not significant"
    if first.left == "rl" and against_stage:
        text_by_gain = {1: f"RL improves on {right}", -1: f"RL is worse than {right}"}
        no_difference = f"RL made no significant difference against {right}"
    elif against_stage:
        text_by_gain = {1: f"{left} improves on {right}", -1: f"{left} is worse than {right}"}
    else:
        text_by_gain = {1: f"{left} beats {right}", -1: f"{left} loses to {right}"}
    text = f"{text_by_gain.get(first.gain, no_difference)}: {_format_evidence(report, first)}"
    if not first.gain and any(other.gain for other in others):
        text = f"{left} against {right} depends on the metric: {_format_evidence(report, first)}, not significant"
    words_by_gain = {
        1: "it is significantly better",
        -1: "it is significantly worse",
        0: "the difference is not significant",
    }
    for other in others:
        if other.gain != first.gain:
            text += f"; in {other.metric} {words_by_gain[other.gain]} ({_format_interval(other)})"
    return Finding(f"{text[0].upper()}{text[1:]}.", first.gain)


def _format_evidence(report: Mapping[str, Any], difference: Difference) -> str:
    """Format both scores of a difference, their ratio if it is large, and the interval."""
    scores = {row.name: row.scores.get(difference.metric) for row in select_scores(report)}
    left, right = scores.get(difference.left), scores.get(difference.right)
    if left is None or right is None:
        return f"{difference.metric} {_format_interval(difference)}"
    ratio = f", {left / right:.1f} times as much" if right > 0 and left / right >= 1.5 else ""
    return f"{difference.metric} {format_number(left)} against {format_number(right)}{ratio} ({_format_interval(difference)})"


def _format_interval(difference: Difference) -> str:
    """Format a difference and its 95 % interval."""
    # A bound that would be written as 0 although it is not gets more digits.
    digits = 4 if all(round(bound, 4) for bound in (difference.low, difference.high)) else 6
    low, high = (format_number(bound, digits, sign=True) for bound in (difference.low, difference.high))
    return f"{format_number(difference.diff, digits, sign=True)}, 95 % interval {low} to {high}"


def _describe_significance(difference: Difference) -> str:
    """Return whether a difference is significant, and its direction, as the end of a sentence."""
    return {1: "is significant and up", -1: "is significant and down"}.get(
        difference.direction, "is not significant"
    )


def _list_scores(report: Mapping[str, Any]) -> Finding:
    """List the scores of all subjects in one metric, for a report without comparisons."""
    rows = select_scores(report)
    metric = next(iter(select_headline_metrics(report)), None)
    if metric is None:
        return Finding("The stages have no scores, so there is nothing to compare.", tone=0)
    scores = ", ".join(f"{format_name(row.name)} {format_number(row.scores.get(metric))}" for row in rows)
    return Finding(f"{metric}: {scores}. No pairs were compared, so no stage is called better.", tone=0)


def _describe_memory(report: Mapping[str, Any]) -> list[Finding]:
    """Describe what the memory of the last stage adds to its model."""
    stage = list(report.get("stages") or {})[-1]
    with_memory, alone = (
        {row.name: row.scores for row in select_scores(report, search=search)}.get(stage, {})
        for search in ("exhaustive", "model alone")
    )
    metrics = [name for name in select_headline_metrics(report) if name in with_memory and name in alone]
    if not metrics:
        return []
    metric = metrics[0]
    text = (
        f"{format_name(stage)} without its memory, the model alone, has {metric} {format_number(alone[metric])}, "
        f"with its memory {format_number(with_memory[metric])}"
    )
    if gain := ((report.get("memory") or {}).get(stage) or {}).get("gain", {}).get(metric):
        difference = Difference(stage, stage, metric, gain["diff"], gain["low"], gain["high"])
        text += f": the difference {_describe_significance(difference)} ({_format_interval(difference)})"
    text = f"{text[0].upper()}{text[1:]}"
    return [Finding(f"{text}.", tone=0)]


def _describe_interruptions(report: Mapping[str, Any]) -> list[Finding]:
    """Describe whether a run was resumed, or lost workers."""
    interruptions = list(report.get("interruptions") or ())
    seconds = [part["seconds"] for part in interruptions if "seconds" in part]
    losses = [part["why"] for part in interruptions if "seconds" not in part]
    findings = []
    if seconds:
        times = "once" if len(seconds) == 1 else f"{len(seconds)} times"
        parts = ", ".join(f"{part:.0f} s" for part in seconds)
        findings.append(
            Finding(f"The run was resumed {times}, after {parts} of work; all times include that.", tone=0)
        )
    if losses:
        findings.append(
            Finding(f"The run continued from a checkpoint after a loss: {'; '.join(losses)}.", tone=0)
        )
    return findings


def _describe_isolations(report: Mapping[str, Any]) -> list[Finding]:
    """Describe which nodes and devices were not used because their probes failed."""
    findings = []
    for entry in report.get("isolated") or ():
        subject = (
            f"{entry['device']} of node {entry['node'][:8]}"
            if entry["device"]
            else f"Node {entry['node'][:8]}"
        )
        ended = f", for {entry['until'] - entry['since']:.0f} s" if entry["until"] else ""
        findings.append(Finding(f"{subject} was isolated{ended}: {entry['why']}.", tone=-1))
    return findings


def _describe_trackers(report: Mapping[str, Any]) -> list[Finding]:
    """Describe which trackers lack metrics of the run."""
    return [
        Finding(
            f"The tracker {name} lacks metrics of this run, which are in metrics.jsonl: {facts['error']}",
            tone=-1,
        )
        for name, facts in (report.get("tracking") or {}).items()
        if facts["error"]
    ]


def _describe_rewards(report: Mapping[str, Any]) -> list[Finding]:
    """Describe how each reward changed during RL."""
    rewards = {name: list(values) for name, values in (report.get("rewards") or {}).items()}
    rewards = {name: values for name, values in rewards.items() if _is_finite_pair(values[:2])}
    if not rewards:
        return []
    prompts, _, _ = str(report.get("rewards_on") or "").partition(";")
    on_prompts = f" on {prompts}" if prompts else ""
    total = rewards.pop("total", None)  # the reward that RL trains: the weighted sum of the others
    parts = [f"{format_name(name)} {_describe_change(values)}" for name, values in rewards.items()]
    if total is None:
        return [Finding(f"Rewards{on_prompts}: {'; '.join(parts)}.", tone=0)]
    text = f"The trained reward {_describe_change(total)}{on_prompts}"
    return [Finding(f"{text}{': ' if parts else ''}{'; '.join(parts)}.", get_reward_direction(total))]


def _find_reward_hacking(report: Mapping[str, Any]) -> list[Finding]:
    """Find stages whose trained reward rose while their held-out metrics fell, which is reward hacking."""
    findings, stages = [], list(report.get("stages") or {})
    for stage, part in (report.get("stage_rewards") or {}).items():
        total = list((part.get("rewards") or {}).get("total") or [])
        stage_before = stages[stages.index(stage) - 1] if stage in stages and stages.index(stage) else None
        if len(total) < 2 or get_reward_direction(total) <= 0 or stage_before is None:
            continue
        losses = [
            difference
            for difference in iterate_differences(report)
            if (difference.left, difference.right) == (stage, stage_before)
            and difference.gain < 0
            and difference.metric in select_headline_metrics(report)
        ]
        if losses:
            evidence = "; ".join(f"{loss.metric} {_format_interval(loss)}" for loss in losses)
            text = (
                f"Reward hacking in {format_name(stage)}: the trained reward {_describe_change(total)} "
                f"while held-out metrics fell against {format_name(stage_before)}: {evidence}."
            )
            findings.append(Finding(text, tone=-1))
    return findings


def _describe_reranking(report: Mapping[str, Any]) -> list[Finding]:
    """Describe how re-ranking the lists of an RL stage's initial model by its rewards compares with training."""
    findings = []
    metric = next(iter(select_headline_metrics(report)), None)
    baselines, stages = report.get("baselines") or {}, report.get("stages") or {}
    for stage, part in (report.get("stage_rewards") or {}).items():
        rerank, rerank_scores = part.get("rerank"), baselines.get(f"{stage}_rerank") or {}
        if not rerank:
            continue
        text = (
            f"Re-ranking the start of {format_name(stage)} by the same rewards, without training (multiplier "
            f"{format_number(rerank['multiplier'])} nats): the trained reward {_describe_change(list(rerank['total']))}"
        )
        if metric in rerank_scores and metric in stages.get(stage, {}):
            stage_score = format_number(stages[stage][metric])
            text += f"; {metric} {format_number(rerank_scores[metric])} against {stage_score} of {format_name(stage)}"
        findings.append(Finding(f"{text}.", tone=0))
    return findings


def _describe_memory_in_rl(report: Mapping[str, Any]) -> list[Finding]:
    """Describe how much of the policy an RL stage cannot change, because it is that of a memory."""
    findings = []
    for stage in report.get("stage_rewards") or {}:
        weights = (report.get("memory") or {}).get(stage) or {}
        if weights.get("l", 0.0) >= _LARGE_MEMORY and weights.get("b", 1.0) <= _LOOSE_MEMORY:
            findings.append(
                Finding(
                    f"{format_name(stage)} trains the model alone: the memory has {100 * weights['l']:.0f} % of the policy's "
                    "probability and hardly follows the model, so lists and rewards change less than the model does.",
                    tone=0,
                )
            )
    return findings


def _describe_unscored_prompts(report: Mapping[str, Any]) -> list[Finding]:
    """Describe the prompts that were left out of training because a reward gave them no score."""
    return [
        Finding(
            f"Reward {name} gave no score to {facts['prompts']:,} prompts in {facts['steps']:,} steps, which were left out: "
            f"{facts['why']}",
            tone=-1,
        )
        for name, facts in (report.get("quarantined") or {}).items()
    ]


def _describe_floors(report: Mapping[str, Any]) -> list[Finding]:
    """Describe whether each reward stayed above its floor."""
    findings = []
    for name, floor in (report.get("floors") or {}).items():
        held_text = "held" if floor["held"] else "was not held"
        before, after = floor.get("held_out") or (None, None)
        values = f"{format_number(floor['mean'])} in the last {floor['steps']} steps"
        if after is not None:
            values = f"{format_number(after)} for users that RL never trained on ({format_number(before)} before), {values}"
        findings.append(
            Finding(
                f"The floor of {name} {held_text}: at least {format_number(floor['at_least'])}; {values} (multiplier "
                f"{format_number(floor['multiplier'])}).",
                tone=1 if floor["held"] else -1,
            )
        )
    return findings


def _find_data_limits(report: Mapping[str, Any]) -> list[Finding]:
    """Describe properties of the data or of the semantic ids that limit what the scores mean."""
    data, tokenizer = report.get("data") or {}, report.get("tokenizer") or {}
    texts = (
        describe_unknown_items(data),
        describe_duplicates(data),
        describe_shared_codes(tokenizer, data.get("items", 0)),
    )
    findings = [Finding(text, tone=-1) for text in texts if text]
    if labels := describe_lost_labels(data):
        findings.append(Finding(labels, tone=-1 if has_many_lost_labels(data) else 0))
    return findings


def _describe_repeats(report: Mapping[str, Any]) -> list[Finding]:
    """Describe how events of items that the user has seen before are treated, if there are any."""
    data = report.get("data") or {}
    text = describe_repeats(data)
    return [Finding(text, tone=0)] if text and any(data["repeats"]["share"].values()) else []


def get_reward_direction(values: list[float]) -> int:
    """Return 1, 0 or -1 for a reward that rose, did not change or fell.

    With an interval that contains 0, a reward did not change.

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
        before_to_after = f"{format_number(before, digits)} to {format_number(after, digits)}"
        return f"did not change significantly ({before_to_after}, 95 % interval {low} to {high})"
    if format_number(before, digits) == format_number(after, digits):
        return f"stayed at {format_number(after, digits)}"
    verb = "rose" if after > before else "fell"
    percents = 100 * (after / before - 1) if before > 0 else 0.0
    percent = (
        f" ({format_number(percents, 0 if abs(percents) >= 1 else 1, sign=True)} %)" if before > 0 else ""
    )
    return f"{verb} from {format_number(before, digits)} to {format_number(after, digits)}{percent}"


def _is_finite_pair(values: list[Any]) -> bool:
    """Return whether these are two finite numbers."""
    return len(values) == 2 and all(
        isinstance(value, int | float) and math.isfinite(value) for value in values
    )
