"""The recommendation service without its HTTP layer: rate limits, features, the engine's queue, and the fallback.

The engine has until the deadline to answer. If it does not, or if it fails, the fallback answers, and the answer names the
reason. Callers must expect the errors `Refused` (a wrong request), `TooManyRequests` (a limit) and `Away` (a service in
another process does not answer). Withdrawn and excluded items are never recommended, not even by the fallback.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from nonet.deploy.opened import Away, CatalogueItems, PreparedQuestion, Refused
from nonet.deploy.serving.access import CircuitBreaker, RateLimiter
from nonet.deploy.serving.service.engines import Building
from nonet.deploy.serving.service.fallback import FallbackRecommender
from nonet.deploy.serving.service.metrics import ServerMetrics
from nonet.deploy.serving.service.requests import (
    Event,
    EventsRequest,
    Listed,
    Posted,
    RecommendRequest,
    Scored,
    ScoreRequest,
)
from nonet.errors import DeadlineExceeded, NonetError
from nonet.models.generation import Corpus
from nonet.models.inference import Answer

_MAX_TITLES = 20  # maximum number of titles of a user's history in a response
# The circuit breaker counts a missed deadline as a failure only if the deadline was at least this share of the default one.
_MIN_DEADLINE_SHARE = 0.8
JOIN_SHARE = 0.5
"""Share of the time until a question's deadline that its joined columns may take."""
_JOIN_OUTCOMES = 100  # number of newest questions of each join that readiness looks at


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Limits of the service.

    Attributes:
        deadline_s: Deadline of a request that sets none, in seconds.
        waiting: Number of queued questions from which on requests are refused.
        rate: Requests per second that each caller may make; None for no limit.
        burst: Requests that a caller may make at once.
        failures: Number of successive failures after which the circuit breaker opens.
        pause_s: Seconds for which the circuit breaker stays open.
    """

    deadline_s: float = 1.0
    waiting: int = 512
    rate: float | None = None
    burst: float | None = None
    failures: int = 5
    pause_s: float = 2.0


class TooManyRequests(NonetError):
    """Raised when a rate limit or the limit of the queue is reached.

    Attributes:
        retry_s: Seconds after which to try again.
    """

    def __init__(self, message: str, retry_s: float):
        super().__init__(message)
        self.retry_s = retry_s


class RecommendationService:
    """Answers requests for recommendations and scores, and stores posted events.

    Args:
        features: Converts requests to questions: a `RequestFeatures`, or its proxy `RemoteFeatures`.
        engines: Answers questions: an `EnginePool`, or its proxy `RemoteEnginePool`.
        fallback: Answers questions that the engine does not answer.
        settings: The limits of the service.
        metrics: The counters to increase.
        scenes: Names of scenes that a request may give.
    """

    def __init__(
        self,
        features: Any,
        engines: Any,
        fallback: FallbackRecommender,
        settings: ServiceSettings,
        metrics: ServerMetrics,
        scenes: Collection[str] = (),
    ):
        self._scenes = scenes
        self.features, self.engines, self.metrics, self.settings = features, engines, metrics, settings
        self._fallback = fallback
        self._limits = RateLimiter(settings.rate, settings.burst)
        # Of each join, whether the columns of its newest questions were missing.
        self._join_outcomes: dict[str, deque[bool]] = {}
        self.breaker = CircuitBreaker(settings.failures, settings.pause_s)
        metrics.watch(engines, self.breaker)
        engines.watch_catalogue(self.renew)

    def renew(self, corpus: Corpus) -> None:
        """Switch the fallback and the features to a newer version of the catalogue."""
        items = CatalogueItems(corpus, self.features.items)
        # The fallback changes before the features, because questions of the new features may contain new items.
        self._fallback = FallbackRecommender(corpus, items)
        self.features.renew(corpus)

    async def recommend(
        self, request: RecommendRequest, spent_s: float = 0.0, *, caller_name: str = ""
    ) -> Listed:
        """List items for a user.

        Args:
            request: The body of the HTTP request.
            spent_s: Seconds since the request arrived, which count against its deadline.
            caller_name: The name that the caller gave itself. It decides which version answers a request without a user;
                without a name, the version is random.

        Returns:
            The response, with items best first.

        Raises:
            Refused: The request cannot be answered as it is.
            TooManyRequests: The limit of the queue is reached.
        """
        self._check_queue()
        self._check_scene(request.scene)
        make_question = partial(
            self.features.prepare_list_question,
            request.user,
            await self._find_history(request),
            request.k,
            exclude=request.exclude,
            where=request.where,
            withdrawn=self.engines.serving.withdrawn,
            explain=request.explain,
            time=request.time,
        )
        return await self._answer("recommend", request, make_question, spent_s, caller_name)

    async def score(self, request: ScoreRequest, spent_s: float = 0.0, *, caller_name: str = "") -> Listed:
        """Score items, and return them in the order of the request; arguments and errors are those of `recommend`."""
        self._check_queue()
        self._check_scene(request.scene)
        make_question = partial(
            self.features.prepare_score_question,
            request.user,
            await self._find_history(request),
            request.items,
            withdrawn=self.engines.serving.withdrawn,
            explain=request.explain,
            time=request.time,
            values=request.values,
        )
        return await self._answer("score", request, make_question, spent_s, caller_name)

    async def post(self, request: EventsRequest) -> Posted:
        """Store events of a user; they are on disk when this returns.

        Raises:
            Refused: An event is not valid.
            TooManyRequests: The limit of the queue is reached.
            Away: The features run as a service that does not answer.
        """
        self._check_queue()
        events = [event.model_dump() for event in request.events]
        arguments = (request.user, events, request.id)
        if inspect.iscoroutinefunction(self.features.post):  # a proxy of another service
            accepted, unknown, is_new_id = await self.features.post(*arguments)
        else:  # in a thread, because it waits for the disk
            accepted, unknown, is_new_id = await asyncio.to_thread(self.features.post, *arguments)
        self.metrics.events.inc(accepted if is_new_id else 0)
        return Posted(accepted=accepted, unknown=unknown, again=not is_new_id)

    def describe_versions(self) -> dict[str, Any]:
        """Return the response of GET /versions: which versions receive traffic, and problems with the others."""
        serving = self.engines.serving
        return {
            "default": serving.default,
            "shares": serving.shares,
            "refused": list(serving.refused),
            "withdrawn": list(serving.withdrawn),
            "answering": sorted(self.engines.lanes),
            "problems": dict(self.engines.problems),
            "journal": self.features.get_journal_facts(),
        }

    def _check_scene(self, scene: str | None) -> None:
        """Raise Refused if the run does not have a scene that a request gives."""
        if scene is not None and scene not in self._scenes:
            scenes = ", ".join(self._scenes)
            known = f"the run has the scenes {scenes}" if scenes else "the run has no scenes, so omit scene"
            raise Refused("bad_scene", f"there is no scene {scene!r}: {known}")

    async def _find_history(self, request: RecommendRequest | ScoreRequest) -> list[Any] | None:
        """Return the item ids or events of a request's history or titles; None if it has neither.

        Raises:
            Refused: It has both, or a title is that of no item or of several.
        """
        history, titles = request.history, request.like
        if titles is not None:
            if history is not None:
                raise Refused("bad_request", "give `history` or `like`, not both")
            items = self.features.items
            found = await asyncio.to_thread(lambda: [items.find_title(title) for title in titles])
            return items.get_ids(np.array(found, np.int64))
        if history is None:
            return None
        return [
            event.model_dump(exclude_none=True) if isinstance(event, Event) else event for event in history
        ]

    def check_rate(self, caller: str) -> None:
        """Raise TooManyRequests if the rate limit of the caller is reached."""
        wait_s = self._limits.take_token(caller)
        if wait_s:
            self.metrics.refused.labels("limit").inc()
            raise TooManyRequests(
                f"this caller's limit is {self.settings.rate:g} requests per second", wait_s
            )

    def _check_queue(self) -> None:
        """Raise TooManyRequests if the limit of the queue is reached."""
        if self.engines.count_waiting() >= self.settings.waiting:
            self.metrics.refused.labels("queue").inc()
            raise TooManyRequests(f"{self.settings.waiting} requests are queued already", retry_s=1.0)

    async def _answer(
        self,
        verb: str,
        request: RecommendRequest | ScoreRequest,
        make_question: Callable[[], PreparedQuestion | Awaitable[PreparedQuestion]],
        spent_s: float,
        caller_name: str,
    ) -> Listed:
        """Make a question by the features, and answer it by the engine, or by the fallback if one of them fails."""
        start_s, features_failure = time.perf_counter(), ""
        deadline_s = self.settings.deadline_s if request.deadline_ms is None else request.deadline_ms / 1e3
        deadline_s -= spent_s
        try:
            prepared = await self._prepare_question(request, make_question, deadline_s)
        except (Away, TimeoutError) as error:
            prepared = self._make_fallback_question(request)
            features_failure = "deadline" if isinstance(error, TimeoutError) else "features are away"
        self._count_joins(prepared)
        if not prepared.question.user:  # traffic is split by the caller's name, else at random
            traffic = caller_name or secrets.token_hex(8)
            prepared = replace(prepared, question=replace(prepared.question, traffic=traffic))
        took_s = time.perf_counter() - start_s  # the time of the features counts against the deadline
        within_s = deadline_s - took_s
        answer, version, reason = (
            (None, None, features_failure) if features_failure else await self._ask_engine(prepared, within_s)
        )
        fallback_name = None
        if answer is None:
            answer, fallback_name = self._fallback.answer(prepared.question)
            self.metrics.fallbacks.labels(fallback_name, reason).inc()
        version_label = "none" if version is None else str(version)
        self.metrics.seconds.labels(verb, version_label).observe(time.perf_counter() - start_s)
        return Listed(
            items=self._make_response_items(answer, request.explain),
            version=version,
            fallback=fallback_name,
            reason=reason or None,
            cold_start=prepared.cold_start,
            unknown=prepared.unknown,
            missing=list(prepared.missing),
            scene=request.scene,
            history=self.features.items.get_titles(prepared.history[-_MAX_TITLES:])
            if request.explain
            else None,
        )

    async def _prepare_question(
        self,
        request: RecommendRequest | ScoreRequest,
        make_question: Callable[[], PreparedQuestion | Awaitable[PreparedQuestion]],
        within_s: float,
    ) -> PreparedQuestion:
        """Call `make_question`, in a thread if the request has a filter, which reads every item, and read joined columns.

        Raises:
            Away: The features run as a service that does not answer.
            TimeoutError: That service did not answer within `within_s` seconds.
        """
        where = request.where if isinstance(request, RecommendRequest) else None
        if inspect.iscoroutinefunction(
            self.features.prepare_list_question
        ):  # a proxy, whose questions are complete
            remote_question = cast("Awaitable[PreparedQuestion]", make_question())
            return await asyncio.wait_for(remote_question, max(0.0, within_s))
        make_here = cast("Callable[[], PreparedQuestion]", make_question)
        prepared = make_here() if where is None else await asyncio.to_thread(make_here)
        return await self.features.add_joined_columns(prepared, JOIN_SHARE * max(0.0, within_s))

    async def _ask_engine(
        self, prepared: PreparedQuestion, within_s: float
    ) -> tuple[Answer | None, int | None, str]:
        """Ask the engine, unless the deadline has passed or the circuit breaker is open.

        Returns:
            The answer, its version and ""; or None, None and the reason why the engine gave no answer.
        """
        if within_s <= 0:
            return None, None, "deadline"
        if not self.breaker.allow_request():
            return None, None, "engine is left alone"
        try:
            answer, version = await asyncio.wait_for(self.engines.ask(prepared.question, within_s), within_s)
        except (TimeoutError, DeadlineExceeded):
            if within_s >= _MIN_DEADLINE_SHARE * self.settings.deadline_s:
                self.breaker.record_outcome(succeeded=False)
            return None, None, "deadline"
        except Building:  # the engine was not called
            return None, None, "the version is being built"
        except Exception as error:  # on any error the fallback answers, and the reason is counted
            self.breaker.record_outcome(succeeded=False)
            return None, None, type(error).__name__
        self.breaker.record_outcome(succeeded=True)
        return answer, version, ""

    def _count_joins(self, prepared: PreparedQuestion) -> None:
        """Count the joins that a question has read, and those whose store did not answer."""
        for name in prepared.joins:
            is_missing = name in prepared.missing
            self.metrics.joins.labels(name, "missing" if is_missing else "read").inc()
            self._join_outcomes.setdefault(name, deque(maxlen=_JOIN_OUTCOMES)).append(is_missing)

    def explain_unready(self) -> str | None:
        """Return why no model would answer, or which joined columns are mostly missing; None if the service is ready."""
        for name, outcomes in self._join_outcomes.items():
            if 2 * sum(outcomes) > _JOIN_OUTCOMES:
                return f"data.join.{name} was missing in {sum(outcomes)} of the last {len(outcomes)} requests"
        return self.engines.explain_unready()

    def _make_fallback_question(self, request: RecommendRequest | ScoreRequest) -> PreparedQuestion:
        """Make a question without the user's events, for the fallback; withdrawn and excluded items are hidden."""
        items = self.features.items
        if isinstance(request, ScoreRequest):
            item_indices, unknown = items.find_indices(request.items)
            question = self._fallback.make_empty_question(top=0, asked=item_indices)
            return PreparedQuestion(question, cold_start=True, unknown=unknown)
        hidden = [items.find_indices(ids)[0] for ids in (request.exclude, self.engines.serving.withdrawn)]
        hidden += [items.find_excluded(request.where)] if request.where else []
        question = replace(
            self._fallback.make_empty_question(request.k), hidden=np.unique(np.concatenate(hidden))
        )
        return PreparedQuestion(question, cold_start=True)

    def _make_response_items(self, answer: Answer, explain: bool) -> list[Scored]:
        """Convert an answer to the items of a response, in the answer's order."""
        items = self.features.items
        titles = items.get_titles(answer.item) if explain else [None] * len(answer.item)
        rows = []
        for index, item_id in enumerate(items.get_ids(answer.item)):
            row = Scored(item=item_id, score=_to_finite(answer.score[index]), title=titles[index])
            if answer.own is not None and answer.vote is not None:
                row.own, row.vote = _to_finite(answer.own[index]), _to_finite(answer.vote[index])
            if answer.tasks:
                row.tasks = {name: _to_finite(scores[index]) for name, scores in answer.tasks.items()}
            rows.append(row)
        return rows


def _to_finite(value: np.floating) -> float | None:
    """Return a value as a float; None for infinities and NaN, which JSON cannot hold."""
    return float(value) if math.isfinite(value) else None


def get_refused_status(error: Refused) -> int:
    """Return the HTTP status of a refusal: 400 without user and history, 409 for an id of another post, else 422."""
    return {"bad_request": 400, "id_conflict": 409}.get(error.kind, 422)
