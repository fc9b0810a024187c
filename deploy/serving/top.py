"""`nonet top URL`: show a server live in the terminal from its metrics page."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from nonet.deploy.serving.client import Client

_LINE = re.compile(r"^(\w+)(?:\{([^}]*)\})? ([0-9.eE+-]+|\+Inf)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Values = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


def parse_metrics(text: str) -> Values:
    """Parse Prometheus' text format into values by (name, labels)."""
    values = {}
    for line in text.splitlines():
        if found := _LINE.match(line):
            labels = tuple(sorted(_LABEL.findall(found[2] or "")))
            values[found[1], labels] = float(found[3])
    return values


def compute_figures(now: Values, before: Values, seconds: float) -> dict[str, float]:
    """Compute rates and latency quantiles between two scrapes, and the current queue length.

    Args:
        now: Values of the newer page.
        before: Values of the older page.
        seconds: Time between both.

    Returns:
        Figures by column title.
    """
    took = _subtract_buckets(now, before)
    asked = _sum_values(now, "nonet_requests_total") - _sum_values(before, "nonet_requests_total")
    batches = _sum_values(now, "nonet_batches") - _sum_values(before, "nonet_batches")
    questions = _sum_values(now, "nonet_batched_questions") - _sum_values(before, "nonet_batched_questions")
    return {
        "requests/s": asked / seconds,
        "p50 ms": 1e3 * _interpolate_quantile(took, 0.5),
        "p99 ms": 1e3 * _interpolate_quantile(took, 0.99),
        "waiting": _sum_values(now, "nonet_queue"),
        "batch size": questions / batches if batches > 0 else 0.0,
        "fallbacks": _sum_values(now, "nonet_fallbacks_total") - _sum_values(before, "nonet_fallbacks_total"),
        "refused": _sum_values(now, "nonet_refused_total") - _sum_values(before, "nonet_refused_total"),
        "version": _sum_values(now, "nonet_version"),
    }


def watch_server(url: str, every_s: float = 1.0, times: int | None = None) -> None:
    """Show a server until Ctrl-C, or for a number of updates.

    Args:
        url: The server's address.
        every_s: Seconds between two updates.
        times: Number of updates; None for no limit.

    Raises:
        ServerError: The server does not answer.
    """
    from rich import box
    from rich.live import Live
    from rich.table import Table

    client = Client(url)
    before, then = parse_metrics(client.get_metrics()), time.monotonic()
    with Live(refresh_per_second=4) as live:
        while times is None or times > 0:
            time.sleep(every_s)
            now, moment = parse_metrics(client.get_metrics()), time.monotonic()
            table = Table(title=url, box=box.SIMPLE, pad_edge=False)
            for name in compute_figures(now, before, 1.0):
                table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
            table.add_row(*(f"{value:.4g}" for value in compute_figures(now, before, moment - then).values()))
            live.update(table)
            before, then = now, moment
            times = None if times is None else times - 1


def _sum_values(values: Values, name: str) -> float:
    """Return the sum of a metric over its labels."""
    return sum(value for (each, _), value in values.items() if each == name)


def _subtract_buckets(now: Values, before: Values) -> list[tuple[float, float]]:
    """Return (upper bound, requests up to it) of the latency histogram between two pages, ascending."""
    counts: dict[float, float] = {}
    for (name, labels), value in now.items():
        if name == "nonet_request_seconds_bucket":
            bound = float(dict(labels)["le"].replace("+Inf", "inf"))
            counts[bound] = counts.get(bound, 0.0) + value - before.get((name, labels), 0.0)
    return sorted(counts.items())


def _interpolate_quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """Compute a quantile by linear interpolation within its bucket; 0 if there were no requests."""
    total = buckets[-1][1] if buckets else 0.0
    low = count = 0.0
    for bound, up_to in buckets:
        if total and up_to >= share * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (share * total - count) / max(1e-9, up_to - count)
        low, count = bound, up_to
    return 0.0
