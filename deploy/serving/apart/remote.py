"""Proxies of features and engine in other processes, with the methods that a `RecommendationService` calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nonet.deploy.opened import Away, CatalogueItems, OpenedRun, PreparedQuestion
from nonet.errors import NonetError
from nonet.models.generation import Catalogue, Corpus
from nonet.models.inference import Answer, Question
from nonet.workers.registry import ServingState

_REGISTRY_POLL_S, _FACTS_POLL_S, _JOURNAL_POLL_S = 0.05, 1.0, 3.0
QUESTION_TIMEOUT_S = 1.0
"""Seconds within which the features service must answer."""
_POST_TIMEOUT_S = 5.0  # longer, because a post waits for the disk


class RemoteFeatures:
    """A proxy of the `RequestFeatures` behind a Serve handle; the items are known in this process too."""

    def __init__(self, handle: Any, items: CatalogueItems):
        self._handle, self.items = handle, items
        self._journal_facts: dict[str, Any] = {}
        threading.Thread(target=self._poll_journal_facts, name="journal facts", daemon=True).start()

    def renew(self, catalogue: Catalogue) -> None:
        """Use the items of a later version of the catalogue; the other process updates itself."""
        self.items = CatalogueItems(catalogue, self.items)

    def get_journal_facts(self) -> dict[str, Any]:
        """Return `RequestFeatures.get_journal_facts`, at most a few seconds old; empty before the first answer."""
        return dict(self._journal_facts)

    def list_example_users(self, count: int) -> list[int | str]:
        """Return an empty list, because only the other process knows users."""
        return []

    def _poll_journal_facts(self) -> None:
        """Poll the other process for the journal's facts as long as this process runs."""
        while True:
            with suppress(Exception):  # the service does not answer; try again later
                self._journal_facts = self._handle.get_journal_facts.remote().result(timeout_s=5)
            time.sleep(_JOURNAL_POLL_S)

    async def prepare_list_question(self, *arguments: Any, **options: Any) -> PreparedQuestion:
        """Make a question with its joined columns in the other process.

        Raises the errors of `RequestFeatures.prepare_list_question`, and Away if the service does not answer.
        """
        response = self._handle.make_list_question.remote(*arguments, **options)
        return await _await_response(response, QUESTION_TIMEOUT_S)

    async def prepare_score_question(self, *arguments: Any, **options: Any) -> PreparedQuestion:
        """Make a question with its joined columns in the other process.

        Raises the errors of `RequestFeatures.prepare_score_question`, and Away if the service does not answer.
        """
        response = self._handle.make_score_question.remote(*arguments, **options)
        return await _await_response(response, QUESTION_TIMEOUT_S)

    async def post(
        self, user: int | str, events: Sequence[Mapping[str, Any]], id: str | None
    ) -> tuple[int, list[Any], bool]:
        """Call `RequestFeatures.post`. Raises its errors, and Away if the service does not answer.

        After Away it is unknown whether the events were stored. If they have an id, they can be posted again.
        """
        return await _await_response(self._handle.post.remote(user, list(events), id), _POST_TIMEOUT_S)


class RemoteEnginePool:
    """A proxy of the `EnginePool`s behind a Serve handle; active versions are read from the run's registry, as they do."""

    def __init__(self, run: OpenedRun, handle: Any):
        self._run, self._handle = run, handle
        self.serving: ServingState = run.registry.serving
        self.problems: dict[str, str] = {}
        self.swaps, self._open_questions = 0, 0
        self._facts: dict[int, dict[str, float]] = {}
        self._stopped = threading.Event()
        self._catalogue = run.catalogues.get_newest()
        self._renew: Callable[[Corpus], None] | None = None
        threading.Thread(target=self._poll_registry, name="versions", daemon=True).start()
        threading.Thread(target=self._poll_facts, name="facts", daemon=True).start()

    def watch_catalogue(self, renew: Callable[[Corpus], None]) -> None:
        """Call `renew` with every later version of the catalogue."""
        self._renew = renew

    @property
    def lanes(self) -> list[int]:
        """The numbers of the versions that receive traffic."""
        return self.serving.versions

    async def ask(self, question: Question, within_s: float) -> tuple[Answer, int]:
        """Return the answer and its version. Raises the engine's error, or Away if no engine answers in time."""
        self._open_questions += 1
        try:
            return await _await_response(self._handle.answer.remote(question, within_s), within_s)
        finally:
            self._open_questions -= 1

    def get_facts(self) -> dict[int, dict[str, float]]:
        """Return `EnginePool.get_facts` of one of the engine's replicas, about a second old."""
        return dict(self._facts)

    def count_waiting(self) -> int:
        """Return the number of questions of this process that are not answered yet."""
        return self._open_questions

    def explain_unready(self) -> str | None:
        """Return why no engine answers, or it is not known what is served, as far as this process knows; else None."""
        return self._run.registry.problem or self.problems.get("engine")

    def close(self) -> None:
        """Stop polling."""
        self._stopped.set()

    def _poll_registry(self) -> None:
        """Poll the run for its newest catalogue and its registry's state, until `close`."""
        while not self._stopped.wait(_REGISTRY_POLL_S):
            try:
                serving = self._run.registry.announced
                self.swaps += serving != self.serving
                self.serving = serving
                newest = self._run.catalogues.get_newest()
                if newest is not self._catalogue and self._renew is not None:
                    self._renew(newest)
                    self._catalogue = newest
                self.problems.pop("registry", None)
            except Exception as error:  # the problem may be gone at the next poll
                self.problems["registry"] = " ".join(str(error).split())[:200]

    def _poll_facts(self) -> None:
        """Poll an engine for its facts and problems, until `close`.

        This has its own thread, so that a busy engine does not delay a withdrawal.
        """
        while not self._stopped.wait(_FACTS_POLL_S):
            try:
                self._facts, engine_problems = self._handle.get_facts.remote().result(timeout_s=5)
                registry_problem = self.problems.get("registry")  # of this process
                self.problems = engine_problems | ({"registry": registry_problem} if registry_problem else {})
            except Exception as error:  # the problem may be gone at the next poll
                self.problems["engine"] = " ".join(str(error).split())[:200]


async def _await_response(response: Any, within_s: float) -> Any:
    """Wait for another service's response, and return its result.

    Raises:
        Away: The service does not exist, or does not answer within `within_s` seconds.
        Exception: The error that the service raised.
    """
    from ray.exceptions import RayActorError, RayTaskError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    try:
        return await asyncio.wait_for(response, within_s)
    except TimeoutError:
        raise Away(f"a service did not answer within {within_s:g} s; try again") from None
    except NonetError:  # Ray raises it as a class that is both the service's error and a RayTaskError
        raise
    except (RayActorError, DeploymentUnavailableError, BackPressureError) as error:
        raise Away(f"a service is not available ({type(error).__name__}); try again") from None
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
