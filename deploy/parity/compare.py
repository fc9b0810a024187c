"""Comparison of the same model on two devices or in two precisions, and the limits of the differences.

The sides are compared by module outputs, gradients, predicted distributions and rankings, in NumPy. Errors are relative to the
Euclidean norm. If the precisions differ, the limits of the lower one apply. In float32, another order of summation changes
results by about 1e-6 per layer; bfloat16 has 8 significant bits, so each rounding changes a value by up to 0.4 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nonet.errors import ConfigError
from nonet.models.ranking import compare_paired, compute_per_event, rank_of_target_np
from nonet.samples.batches import gather_masked_items, locate_events
from nonet.samples.sequences import Sequences

# Shapes: P prompts, I items.

# By precision: maximum relative error of a module output and of the gradient, maximum mean KL divergence in nats, minimum
# overlap, and maximum absolute difference of a metric. Lower precisions have larger limits, and a smaller one for the overlap.
LIMITS = {
    "fp32": {"module": 1e-4, "gradient": 1e-4, "kl": 1e-6, "overlap": 0.99, "metric": 0.005},
    "bf16": {"module": 5e-2, "gradient": 5e-2, "kl": 1e-2, "overlap": 0.85, "metric": 0.02},
    "fp16": {"module": 1e-2, "gradient": 1e-2, "kl": 1e-3, "overlap": 0.95, "metric": 0.01},
}
TOP = 10  # number of best items that the overlap compares
_TIE_NATS = 1e-6  # what another order of summation in float32 changes
_PRECISION_ORDER = ("bf16", "fp16", "fp32")  # by limits, the loosest first


@dataclass(frozen=True, slots=True)
class ModuleError:
    """The difference of one module call or one gradient between both sides.

    Attributes:
        name: The module's or parameter's name.
        relative: The norm of the difference divided by the norm of the first side.
        largest: The largest absolute difference.
        same: Whether all bits are equal.
    """

    name: str
    relative: float
    largest: float
    same: bool


@dataclass(frozen=True, slots=True)
class ParityResult:
    """The result of a comparison.

    Attributes:
        sides: {"pool", "device", "precision", "torch": version} of each side.
        weights: A description of the weights' origin.
        prompts: Number of prompts.
        same_bits: Whether modules, gradients and scores are equal in all bits.
        first_different: The first module whose output differs; None if all are equal.
        first_beyond: The first module whose error exceeds the limit; None if there is none.
        modules: Errors of module outputs in the order of execution.
        gradients: Errors of gradients by parameter.
        gradient: Relative error of all gradients as one vector.
        loss: The loss of each side in nats.
        kl: The mean ("mean") and maximum ("most") over prompts of the KL divergence over the catalogue, in nats.
        overlap: The mean share of the first `TOP` items that both sides have in common.
        metrics: Values, difference and interval by metric.
        limits: Limits by name.
        beyond: A sentence for every exceeded limit; empty if the sides agree.
    """

    sides: list[dict[str, str]]
    weights: str
    prompts: int
    same_bits: bool
    first_different: str | None
    first_beyond: str | None
    modules: list[ModuleError]
    gradients: list[ModuleError]
    gradient: float
    loss: tuple[float, float]
    kl: dict[str, float]
    overlap: float
    metrics: dict[str, dict[str, float]]
    limits: dict[str, float]
    beyond: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)

    def to_text(self) -> str:
        """Format the sides, the first differences, the worst errors and the result for readers."""
        sides = [
            f"{side['pool']} ({side['device']}, {side['precision']}, {side['torch']})" for side in self.sides
        ]
        lines = [f"{sides[0]} against {sides[1]}", f"weights: {self.weights}; {self.prompts} prompts", ""]
        lines += [
            f"first module that differs   {self.first_different or 'none: all bits are equal'}",
            f"first module beyond limit   {self.first_beyond or 'none'}",
            *_describe_worst("modules", self.modules),
            *_describe_worst("gradients", self.gradients),
            f"gradient as a whole         off by {self.gradient:.2e} of its norm (limit {self.limits['gradient']:g})",
            f"loss                        {self.loss[0]:.6f} and {self.loss[1]:.6f} nats",
            f"KL over the catalogue       mean {self.kl['mean']:.2e}, maximum {self.kl['most']:.2e} nats "
            f"(limit of the mean {self.limits['kl']:g})",
            f"overlap of the first {TOP}     {self.overlap:.4f} (limit {self.limits['overlap']:g})",
        ]
        for name, values in self.metrics.items():
            lines.append(
                f"{name:<27} {values['a']:.4f} and {values['b']:.4f}, difference {values['diff']:+.4f} "
                f"[{values['low']:+.4f}, {values['high']:+.4f}] (limit {self.limits['metric']:g})"
            )
        verdict = [f"BEYOND: {sentence}" for sentence in self.beyond] or ["within all limits"]
        return "\n".join([*lines, "", *verdict])


def get_limits(precisions: Sequence[str], overrides: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the limits of a pair of precisions: those of the one with the looser limits.

    Args:
        precisions: The precision of each side.
        overrides: Limits by name that override the default ones.

    Raises:
        ConfigError: A limit is unknown.
    """
    limits = dict(LIMITS[min(precisions, key=_PRECISION_ORDER.index)])
    for name, value in (overrides or {}).items():
        if name not in limits:
            raise ConfigError(f"--limit {name!r} is not one of {', '.join(limits)}")
        limits[name] = value
    return limits


def compare(
    answers: Sequence[Mapping[str, Any]],
    seq: Sequences,
    users: np.ndarray,
    positions: np.ndarray,
    tie: np.ndarray,
    *,
    metrics: Sequence[str],
    limits: Mapping[str, float],
    weights: str,
    seed: int,
) -> ParityResult:
    """Compare two sides' answers on the same prompts.

    Args:
        answers: The result of each side: {"side": description, "modules" and "gradients": arrays by name, "loss":
            nats, "scores": log-probabilities [P, I]}.
        seq: The users' events.
        users: The user row of each prompt [P].
        positions: The position of each prompt [P].
        tie: The order of items with equal scores [I].
        metrics: Names of metrics.
        limits: Limits by name.
        weights: A description of the weights' origin.
        seed: The seed of the bootstrap.
    """
    a, b = answers
    modules = compute_errors(a["modules"], b["modules"])
    gradients = compute_errors(a["gradients"], b["gradients"])
    gradient_error = compute_total_error(a["gradients"], b["gradients"])
    kl_P = compute_kl_divergence(a["scores"], b["scores"])
    overlap = compute_overlap(a["scores"], b["scores"], TOP)
    ranks = [_rank_targets(side["scores"], seq, users, positions, tie) for side in answers]
    metric_values = {name: _compare_metric(name, ranks, users, seed) for name in metrics}
    kl = {"mean": float(kl_P.mean()), "most": float(kl_P.max())}
    # `not <=` instead of `>`, so that NaN exceeds the limit.
    first_beyond = next((module for module in modules if not module.relative <= limits["module"]), None)
    has_same_arrays = all(error.same for error in [*modules, *gradients])
    return ParityResult(
        sides=[dict(side["side"]) for side in answers],
        weights=weights,
        prompts=len(users),
        same_bits=has_same_arrays and np.array_equal(a["scores"], b["scores"]),
        first_different=next((module.name for module in modules if not module.same), None),
        first_beyond=first_beyond and first_beyond.name,
        modules=modules,
        gradients=gradients,
        gradient=gradient_error,
        loss=(a["loss"], b["loss"]),
        kl=kl,
        overlap=overlap,
        metrics=metric_values,
        limits=dict(limits),
        beyond=_describe_exceeded_limits(first_beyond, gradient_error, kl, overlap, metric_values, limits),
    )


def compute_errors(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> list[ModuleError]:
    """Compute the errors of arrays by name, in the order of `a`, then of those that only `b` has.

    An array that only one side has, or that has another shape, gets an infinite error.
    """
    errors = []
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b or a[name].shape != b[name].shape:
            errors.append(ModuleError(name, relative=float("inf"), largest=float("inf"), same=False))
            continue
        x, y = a[name].astype(np.float64), b[name].astype(np.float64)
        difference_norm = np.linalg.norm(x - y)
        norm = max(np.linalg.norm(x), np.finfo(np.float32).tiny)
        relative = float(difference_norm / norm) if difference_norm else 0.0
        largest = float(np.abs(x - y).max(initial=0.0))
        errors.append(ModuleError(name, relative, largest, np.array_equal(a[name], b[name])))
    return errors


def compute_total_error(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Compute the relative error of all arrays as one vector; infinite if one side lacks an array.

    Gradients are compared by this error, because the gradient of a single bias may be a sum over positions that nearly
    cancels. For example, that of depth.norm.0.bias in the quickstart had an error of 31 % in bf16 although the update as a
    whole was accurate.
    """
    if a.keys() != b.keys() or any(a[name].shape != b[name].shape for name in a):
        return float("inf")
    pairs = [(a[name].astype(np.float64), b[name].astype(np.float64)) for name in a]
    difference_norm = np.sqrt(sum(np.square(x - y).sum() for x, y in pairs))
    norm = np.sqrt(sum(np.square(x).sum() for x, _ in pairs))
    return float(difference_norm / max(norm, np.finfo(np.float32).tiny)) if difference_norm else 0.0


def compute_kl_divergence(logp_a_PI: np.ndarray, logp_b_PI: np.ndarray) -> np.ndarray:
    """Compute KL(a || b) [P] in nats over the catalogue; items without probability on side `a` are ignored, but not NaN."""
    a_PI, b_PI = logp_a_PI.astype(np.float64), logp_b_PI.astype(np.float64)
    is_possible_PI = a_PI != -np.inf
    a_PI, b_PI = np.where(is_possible_PI, a_PI, 0.0), np.where(is_possible_PI, b_PI, 0.0)
    difference_PI = np.where(is_possible_PI, a_PI - b_PI, 0.0)
    probability_PI = np.where(is_possible_PI, np.exp(a_PI), 0.0)
    # E[d + exp(-d) - 1] equals the KL divergence of normalised distributions, and rounding cannot make it negative.
    return (probability_PI * (difference_PI + np.expm1(-difference_PI))).sum(1)


def compute_overlap(a_PI: np.ndarray, b_PI: np.ndarray, k: int) -> float:
    """Compute the mean share of the k best items of either side that are among the best of the other, the smaller of both.

    An item whose score is less than `_TIE_NATS` below that of the last of the best is one of them, so that ties are no
    difference. The share is NaN if a score is.
    """
    if np.isnan(a_PI).any() or np.isnan(b_PI).any():
        return float("nan")
    return min(_compute_share_of_best(a_PI, b_PI, k), _compute_share_of_best(b_PI, a_PI, k))


def _compute_share_of_best(a_PI: np.ndarray, b_PI: np.ndarray, k: int) -> float:
    """Compute the mean share of the k best items of `a` that are among the k best of `b`, or tie with the last of these."""
    best_Pk = np.argsort(-a_PI, axis=1, kind="stable")[:, :k]
    lowest_P1 = np.sort(b_PI.astype(np.float64), axis=1)[:, -k:][:, :1]
    return float((np.take_along_axis(b_PI, best_Pk, axis=1) >= lowest_P1 - _TIE_NATS).mean())


def _rank_targets(
    scores_PI: np.ndarray, seq: Sequences, users: np.ndarray, positions: np.ndarray, tie: np.ndarray
) -> np.ndarray:
    """Return the rank [P] of each prompt's next item among the items that the user may be recommended."""
    target_P = seq.item[locate_events(seq, users, positions)].astype(np.int64)
    return rank_of_target_np(scores_PI, target_P, gather_masked_items(seq, users, positions), tie)


def _compare_metric(name: str, ranks: Sequence[np.ndarray], users: np.ndarray, seed: int) -> dict[str, float]:
    """Return a metric of both sides ("a", "b"), its difference ("diff"), and its interval ("low", "high")."""
    values_a, values_b = (compute_per_event(name, side_ranks) for side_ranks in ranks)
    difference = compare_paired(values_a, values_b, users, seed)
    return {"a": float(values_a.mean()), "b": float(values_b.mean()), **difference}


def _describe_exceeded_limits(
    first_beyond: ModuleError | None,
    gradient_error: float,
    kl: Mapping[str, float],
    overlap: float,
    metric_values: Mapping[str, Mapping[str, float]],
    limits: Mapping[str, float],
) -> list[str]:
    """Return a sentence for every limit that was exceeded; NaN exceeds all limits."""
    sentences = []
    if first_beyond:
        sentences.append(
            f"module {first_beyond.name} differs by {first_beyond.relative:.2e}, the limit is {limits['module']:g}"
        )
    if not gradient_error <= limits["gradient"]:
        sentences.append(f"the gradient differs by {gradient_error:.2e}, the limit is {limits['gradient']:g}")
    if not kl["mean"] <= limits["kl"]:
        sentences.append(f"the mean KL is {kl['mean']:.2e} nats, the limit is {limits['kl']:g}")
    if not overlap >= limits["overlap"]:
        sentences.append(f"{overlap:.4f} of the first {TOP} are shared, the limit is {limits['overlap']:g}")
    for name, values in metric_values.items():
        if not abs(values["diff"]) <= limits["metric"]:
            sentences.append(f"{name} differs by {values['diff']:+.4f}, the limit is {limits['metric']:g}")
    return sentences


def _describe_worst(title: str, errors: Sequence[ModuleError]) -> list[str]:
    """Return a line about the number of arrays that are equal in all bits and the largest error; none without arrays."""
    if not errors:
        return []
    worst = max(errors, key=lambda error: np.nan_to_num(error.relative, nan=np.inf))
    same_count = sum(error.same for error in errors)
    if same_count == len(errors):
        return [f"{title:<27} all {same_count} equal in all bits"]
    return [
        f"{title:<27} {same_count} of {len(errors)} equal in all bits; largest error {worst.relative:.2e} of its norm "
        f"({worst.name})"
    ]
