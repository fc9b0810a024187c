"""The progress of a stage, and its texts for a panel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class StageProgress:
    """The progress of a stage.

    Attributes:
        stage: The stage's name.
        total: Number of steps of the stage; None if unknown.
        started: Time of the panel's clock at the start, in seconds.
        first: Number of steps that were done before the run was resumed.
        step: Number of steps done so far, including `first`.
        metrics: The latest metrics.
        elapsed_s: Seconds since the start.
    """

    stage: str
    total: int | None
    started: float
    first: int = 0
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left at the speed so far; None before the first step and without a total."""
        if not self.total or not self.first < self.step <= self.total:
            return None
        return self.elapsed_s * (self.total - self.step) / (self.step - self.first)


def format_progress(progress: StageProgress) -> str:
    """Format a stage in progress as one line: "pretrain 120/440  loss 8.123  20 s, about 53 s left"."""
    total = f"/{progress.total:,}" if progress.total else ""
    left = f", about {progress.left_s:.0f} s left" if progress.left_s else ""
    parts = [
        f"{progress.stage} {progress.step:,}{total}",
        format_metrics(progress.metrics),
        f"{progress.elapsed_s:.0f} s{left}",
    ]
    return "  ".join(part for part in parts if part)


def format_steps(count: int) -> str:
    """Format a number of steps: "1 step", "2 steps"."""
    return f"{count:,} step{'' if count == 1 else 's'}"


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Format metrics in their order: "loss 8.123  6,200 rows/s"."""
    return "  ".join(
        f"{value:,.0f} {name}" if name.endswith("/s") and value >= 10 else f"{name} {value:.4g}"
        for name, value in metrics.items()
    )
