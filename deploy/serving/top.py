"""`nonet top URL`: show a server live in the terminal from its metrics page."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from nonet.deploy.serving.client import Client

_LINE = re.compile(r"^(\w+)(?:\{([^}]*)\})? ([0-9.eE+-]+|\+Inf)$")  # groups: metric, labels, value
_LABEL = re.compile(r'(\w+)="([^"]*)"')  # groups: name, value

Values = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]  # by (metric, sorted (label, value) pairs)


def parse_metrics(text: str) -> Values:
    """Parse a page in Prometheus' text format into values by (metric, labels)."""
    values = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            labels = tuple(sorted(_LABEL.findall(match[2] or "")))
            values[match[1], labels] = float(match[3])
    return values


def compute_figures(now: Values, before: Values, seconds: float) -> dict[str, float]:
    """Compute the columns of the table from two pages of metrics.

    Args:
        now: Values of the newer page.
        before: Values of the older page.
        seconds: Time between the two pages.

    Returns:
        Figures by column title. The queue length and the version are current; the others are of the time
        between the two pages.
    """
    latency_buckets = _subtract_buckets(now, before)
    requests = _sum_values(now, "nonet_requests_total") - _sum_values(before, "nonet_requests_total")
    batches = _sum_values(now, "nonet_batches") - _sum_values(before, "nonet_batches")
    questions = _sum_values(now, "nonet_batched_questions") - _sum_values(before, "nonet_batched_questions")
    return {
        "requests/s": requests / seconds,
        "p50 ms": 1e3 * _interpolate_quantile(latency_buckets, 0.5),
        "p99 ms": 1e3 * _interpolate_quantile(latency_buckets, 0.99),
        "waiting": _sum_values(now, "nonet_queue"),
        "batch size": questions / batches if batches > 0 else 0.0,
        "fallbacks": _sum_values(now, "nonet_fallbacks_total") - _sum_values(before, "nonet_fallbacks_total"),
        "refused": _sum_values(now, "nonet_refused_total") - _sum_values(before, "nonet_refused_total"),
        "version": _sum_values(now, "nonet_version"),
    }


def watch_server(url: str, every_s: float = 1.0, times: int | None = None) -> None:
    """Show a server's figures in the terminal until Ctrl-C, or for a number of updates.

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
    before, before_s = parse_metrics(client.get_metrics()), time.monotonic()
    with Live(refresh_per_second=4) as live:
        while times is None or times > 0:
            time.sleep(every_s)
            now, now_s = parse_metrics(client.get_metrics()), time.monotonic()
            figures = compute_figures(now, before, seconds=now_s - before_s)
            table = Table(title=url, box=box.SIMPLE, pad_edge=False)
            for title in figures:
                table.add_column(title, justify="right", no_wrap=True, min_width=len(title))
            table.add_row(*(f"{value:.4g}" for value in figures.values()))
            live.update(table)
            before, before_s = now, now_s
            times = None if times is None else times - 1


def _sum_values(values: Values, metric: str) -> float:
    """Return the sum of a metric over its labels."""
    return sum(value for (name, _), value in values.items() if name == metric)


def _subtract_buckets(now: Values, before: Values) -> list[tuple[float, float]]:
    """Return the latency histogram of the requests between two pages.

    Returns:
        (upper bound in seconds, number of requests up to it) of each bucket, by ascending bound.
    """
    count_by_bound: dict[float, float] = {}
    for (name, labels), value in now.items():
        if name == "nonet_request_seconds_bucket":
            bound = float(dict(labels)["le"].replace("+Inf", "inf"))
            count = value - before.get((name, labels), 0.0)
            count_by_bound[bound] = count_by_bound.get(bound, 0.0) + count
    return sorted(count_by_bound.items())


def _interpolate_quantile(buckets: list[tuple[float, float]], quantile: float) -> float:
    """Compute a quantile of the buckets of `_subtract_buckets`, in seconds; 0 if there were no requests.

    The quantile is interpolated linearly within its bucket. In the last one, which has no upper bound, it is
    the lower bound.
    """
    total = buckets[-1][1] if buckets else 0.0
    lower_bound = count_below = 0.0
    for upper_bound, count in buckets:
        if total and count >= quantile * total:
            if upper_bound == float("inf"):
                return lower_bound
            in_bucket = (quantile * total - count_below) / max(1e-9, count - count_below)
            return lower_bound + (upper_bound - lower_bound) * in_bucket
        lower_bound, count_below = upper_bound, count
    return 0.0
