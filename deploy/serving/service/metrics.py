"""Metrics of a server, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

_SECONDS = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """Counts of one process; `look` adds what queues and versions say when they are asked."""

    def __init__(self):
        self.registry = CollectorRegistry()
        named = {"registry": self.registry, "namespace": "nonet"}
        self.requests = Counter(
            "requests", "Requests by verb, status and version", ["verb", "status", "version"], **named
        )
        self.seconds = Histogram(
            "request_seconds", "Seconds to an answer", ["verb", "version"], buckets=_SECONDS, **named
        )
        self.fallbacks = Counter("fallbacks", "Answers of a fall-back", ["what", "reason"], **named)
        self.refused = Counter("refused", "Requests refused with 429", ["why"], **named)
        self.events = Counter("events", "Events acknowledged", **named)

    def watch(self, engines: Any, breaker: Any) -> None:
        """Show queues and versions too."""
        self.registry.register(_Watched(engines, breaker))

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)


class _Watched:
    def __init__(self, engines: Any, breaker: Any):
        self._engines, self._breaker = engines, breaker

    def collect(self) -> Iterator[Any]:
        """Of each version that answers: what waits, what was merged; and which is the default."""
        by_version = {
            name: GaugeMetricFamily(f"nonet_{name}", about, labels=["version"])
            for name, about in (
                ("queue", "Questions that wait"),
                ("batches", "Batches computed"),
                ("batched_questions", "Questions computed in them"),
                ("batched_tokens", "Their cost, in positions of a history"),
                ("batch_seconds", "Seconds computed"),
                ("batch_size", "Questions of the newest batch"),
                ("late", "Questions whose deadline passed in the queue"),
                ("state_hits", "Questions of users whose state was kept"),
                ("state_misses", "Questions of others"),
                ("state_bytes", "Bytes of states"),
            )
        }
        for version, facts in self._engines.facts().items():
            for name, family in by_version.items():
                family.add_metric([str(version)], facts[name])
        yield from by_version.values()
        yield GaugeMetricFamily(
            "nonet_version", "The version of most users", self._engines.serving.default or 0
        )
        yield GaugeMetricFamily("nonet_swaps", "Versions swapped in", self._engines.swaps)
        yield GaugeMetricFamily(
            "nonet_problems", "Versions or commits that cannot be served", len(self._engines.problems)
        )
        yield GaugeMetricFamily(
            "nonet_breaker_open", "1 while the engine is left alone", self._breaker.state != "closed"
        )
