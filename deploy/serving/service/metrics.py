"""Metrics of a server in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

_SECONDS = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class ServerMetrics:
    """Counts of one process; `watch` adds those of queues and versions."""

    def __init__(self):
        self.registry = CollectorRegistry()
        named = {"registry": self.registry, "namespace": "nonet"}
        self.requests = Counter(
            "requests", "Requests by verb, status and version", ["verb", "status", "version"], **named
        )
        self.seconds = Histogram(
            "request_seconds", "Response time in seconds", ["verb", "version"], buckets=_SECONDS, **named
        )
        self.fallbacks = Counter("fallbacks", "Answers by a fallback", ["what", "reason"], **named)
        self.refused = Counter("refused", "Requests refused with 429", ["why"], **named)
        self.events = Counter("events", "Events acknowledged", **named)

    def watch(self, engines: Any, breaker: Any) -> None:
        """Add figures of queues and versions."""
        self.registry.register(_EngineCollector(engines, breaker))

    def render(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector:
    """A collector of figures of the active versions."""

    def __init__(self, engines: Any, breaker: Any):
        self._engines, self._breaker = engines, breaker

    def collect(self) -> Iterator[Any]:
        """Yield figures of each active version, and the default version."""
        by_version = {
            name: GaugeMetricFamily(f"nonet_{name}", about, labels=["version"])
            for name, about in (
                ("queue", "Queued questions"),
                ("batches", "Batches computed"),
                ("batched_questions", "Questions in computed batches"),
                ("batched_tokens", "Cost of computed batches, in positions of histories"),
                ("batch_seconds", "Seconds spent computing batches"),
                ("batch_size", "Questions in the newest batch"),
                ("late", "Questions whose deadline passed in the queue"),
                ("state_hits", "Questions of users with a cached state"),
                ("state_misses", "Questions of users without a cached state"),
                ("state_bytes", "Bytes of cached states"),
            )
        }
        for version, facts in self._engines.get_facts().items():
            for name, family in by_version.items():
                family.add_metric([str(version)], facts[name])
        yield from by_version.values()
        yield GaugeMetricFamily("nonet_version", "Default version", self._engines.serving.default or 0)
        yield GaugeMetricFamily("nonet_swaps", "Versions swapped in", self._engines.swaps)
        yield GaugeMetricFamily(
            "nonet_problems", "Versions or commits that cannot be served", len(self._engines.problems)
        )
        yield GaugeMetricFamily(
            "nonet_breaker_open",
            "1 while the circuit breaker is open or half open",
            self._breaker.state != "closed",
        )
