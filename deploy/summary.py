"""The end of a run as a few lines of text: verdict and table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonet.controller.receipt import receipt_text
from nonet.deploy.verdict import verdict


def summary(report: Mapping[str, Any]) -> str:
    """Verdict sentences, then baselines and stages by metric (test, full ranking, all held-out events)."""
    rows = {**report.get("baselines", {}), **report.get("stages", {})}
    metrics = list(next(iter(rows.values()), {}))
    lines = [*verdict(report), ""]
    wide = {metric: max(11, len(metric) + 2) for metric in metrics}
    lines.append(f"{'test, full ranking':<20}" + "".join(f"{metric:>{wide[metric]}}" for metric in metrics))
    lines += [
        f"{name:<20}"
        + "".join(f"{values.get(metric, float('nan')):>{wide[metric]}.4f}" for metric in metrics)
        for name, values in rows.items()
    ]
    wall, peak = report.get("wall_s", {}).get("total", 0), report.get("peak_rss_bytes", 0)
    lines.append(
        f"\n{wall:.0f} s" + (f", {peak / 1e9:.2f} GB at most (PSS of all processes)" if peak else "")
    )
    receipt = receipt_text(report.get("receipt") or {})
    return "\n".join([*lines, *(["", receipt] if receipt else [])])
