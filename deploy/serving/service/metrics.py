"""Metrics of a server in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class ServerMetrics:
    """Counters and response times of one process; `watch` adds figures of queues and versions."""

    def __init__(self):
        self.registry = CollectorRegistry()
        common = {"registry": self.registry, "namespace": "nonet"}
        self.requests = Counter(
            "requests", "Requests by verb, status and version", ["verb", "status", "version"], **common
        )
        self.seconds = Histogram(
            "request_seconds",
            "Response time in seconds",
            ["verb", "version"],
            buckets=_LATENCY_BUCKETS_S,
            **common,
        )
        self.fallbacks = Counter("fallbacks", "Answers by a fallback", ["what", "reason"], **common)
        self.refused = Counter("refused", "Requests refused with 429", ["why"], **common)
        self.joins = Counter("joins", "Questions by join and outcome", ["join", "outcome"], **common)
        self.events = Counter("events", "Events acknowledged", **common)

    def watch(self, engines: Any, breaker: Any) -> None:
        """Add figures of queues, versions and the circuit breaker, which are read at every `render`.

        Args:
            engines: An `EnginePool`, or its proxy.
            breaker: A `CircuitBreaker`.
        """
        self.registry.register(_EngineCollector(engines, breaker))

    def render(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector:
    """A Prometheus collector of figures of the active versions."""

    def __init__(self, engines: Any, breaker: Any):
        self._engines, self._breaker = engines, breaker

    def collect(self) -> Iterator[Any]:
        """Yield the metric families: figures of each active version, then those of the whole server."""
        families = {  # by name in `get_facts`
            name: GaugeMetricFamily(f"nonet_{name}", description, labels=["version"])
            for name, description in (
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
            for name, family in families.items():
                family.add_metric([str(version)], facts[name])
        yield from families.values()
        yield GaugeMetricFamily("nonet_version", "Default version", self._engines.serving.default or 0)
        yield GaugeMetricFamily("nonet_swaps", "Versions swapped in", self._engines.swaps)
        yield GaugeMetricFamily(
            "nonet_problems", "Versions or checkpoints that cannot be served", len(self._engines.problems)
        )
        yield GaugeMetricFamily(
            "nonet_breaker_open",
            "1 while the circuit breaker is open or half open",
            self._breaker.state != "closed",
        )
