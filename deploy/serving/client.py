"""A typed client of the recommendation server, with one connection per thread; it needs only the standard library."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from nonet.deploy.serving.access import READ_TOKEN, WRITE_TOKEN
from nonet.errors import ConfigError, NonetError

_MAX_TRIES = 3  # number of times that a request is sent when connections break


class ServerError(NonetError):
    """A server refused a request or did not answer.

    Attributes:
        status: The HTTP status, 0 if the server could not be reached.
        kind: The machine-readable kind of error.
        retry_s: Seconds after which to try again; None if the server gave no number.
    """

    def __init__(self, message: str, status: int, kind: str, retry_s: float | None = None):
        super().__init__(message)
        self.status, self.kind, self.retry_s = status, kind, retry_s


@dataclass(frozen=True, slots=True)
class RecommendedItem:
    """A recommended or scored item.

    The server adds votes to the model's scores: for items that often follow those of the history, and for
    their nearest items.

    Attributes:
        item: The item's id.
        score: Its score in nats; None in an answer by a fallback.
        title: Its title, if `explain` was requested.
        own: The model's score without votes in nats, if `explain` was requested.
        vote: The item's share of the votes, if `explain` was requested.
        tasks: The probability of each further task of a click model, by name.
    """

    item: int | str
    score: float | None
    title: str | None = None
    own: float | None = None
    vote: float | None = None
    tasks: Mapping[str, float | None] | None = None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The answer to a request.

    Attributes:
        items: Items, best first; those of `score` in the order of the request.
        version: The number of the version that answered; None for a fallback.
        fallback: The name of the fallback that answered; None if the model did.
        reason: The reason why a fallback answered; None if the model did.
        cold_start: Whether no event of the user is known.
        unknown: Ids in the request that belong to no item.
        missing: Joins whose store did not answer; their columns had missing values.
        scene: The request's scene.
        history: Titles of the user's newest events, if `explain` was requested.
    """

    items: list[RecommendedItem]
    version: int | None
    fallback: str | None = None
    reason: str | None = None
    cold_start: bool = False
    unknown: list[int | str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    scene: str | None = None
    history: list[str] | None = None


class Client:
    """A client of a server's HTTP interface.

    Args:
        url: The server's address, such as http://127.0.0.1:8000.
        token: The token to send, by default NONET_TOKEN, else NONET_READ_TOKEN.
        caller: The name of this client. If a token is used, rate limits apply per name. In requests without a
            user, the name determines which version answers.
        timeout_s: Timeout of a request in seconds.

    Raises:
        ConfigError: The URL is not an address of a server.
    """

    def __init__(
        self, url: str, *, token: str | None = None, caller: str | None = None, timeout_s: float = 10.0
    ):
        split_url = urlsplit(url)
        if split_url.scheme not in ("http", "https") or not split_url.hostname:
            raise ConfigError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8000")
        self._url, self._timeout_s = split_url, timeout_s
        if token is None:
            token = os.environ.get(WRITE_TOKEN) or os.environ.get(READ_TOKEN)
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._headers |= {"X-Caller": caller} if caller else {}
        self._local = threading.local()  # its attribute `connection` is the HTTP connection of a thread

    def recommend(
        self,
        user: int | str | None = None,
        *,
        history: Sequence[Mapping[str, Any] | int | str] | None = None,
        like: Sequence[str] | None = None,
        k: int = 10,
        exclude: Sequence[int | str] = (),
        where: str | None = None,
        scene: str | None = None,
        deadline_ms: float | None = None,
        explain: bool = False,
        time: int | str | None = None,
    ) -> Recommendation:
        """Recommend items for a user or for a history.

        Args:
            user: The user's id.
            history: Item ids, newest last, or events {"item", "time", "event", "values"}, to use instead of the user's events.
            like: Titles of items, newest last, instead of `history`.
            k: Number of items.
            exclude: Ids of items that must not be recommended.
            where: A condition over item columns, such as "price < 20".
            scene: The name of one of the run's scenes; it is returned with the answer.
            deadline_ms: Milliseconds after which a fallback answers; None for the server's default.
            explain: Whether to add titles, scores without votes, and votes.
            time: Time of the request in the unit of the run's log or as ISO text, by default the server's current time.

        Raises:
            ServerError: The server refused the request or did not answer.
        """
        body = {
            "user": user,
            "history": history,
            "like": None if like is None else list(like),
            "k": k,
            "exclude": list(exclude),
            "where": where,
            "scene": scene,
            "time": time,
        }
        return _parse_recommendation(
            self.call("POST", "/recommend", body | {"deadline_ms": deadline_ms, "explain": explain})
        )

    def score(
        self,
        items: Sequence[int | str],
        user: int | str | None = None,
        *,
        history: Sequence[Mapping[str, Any] | int | str] | None = None,
        explain: bool = False,
        time: int | str | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> Recommendation:
        """Score items for a user or for a history.

        Args:
            items: Ids of the items.
            user: The user's id.
            history: Item ids, newest last, or events {"item", "time", "event", "values"}, to use instead of the user's events.
            explain: Whether to add titles, scores without votes, and votes.
            values: Values of the request by column of the data, which click models read.
            time: Time of the request in the unit of the run's log or as ISO text, by default the server's current time.

        Returns:
            The items in their order, without the unknown ones.

        Raises:
            ServerError: The server refused the request or did not answer.
        """
        body = {
            "items": list(items),
            "user": user,
            "history": history,
            "explain": explain,
            "time": time,
            "values": values,
        }
        return _parse_recommendation(self.call("POST", "/score", body))

    def post_events(
        self, user: int | str, events: Sequence[Mapping[str, Any] | int | str], id: str | None = None
    ) -> dict[str, Any]:
        """Post new events of a user; they are on disk when this returns.

        Args:
            user: The user's id.
            events: Item ids, or {"item", "time", "event", "values"}.
            id: An idempotency key: a post with a known id is not stored again. Only with an id does the client
                retry when a connection breaks.

        Returns:
            {"accepted": number of stored events, "unknown": ids of unknown items, "again": whether a post with
            this id was stored before}.

        Raises:
            ServerError: The server refused the request or did not answer.
        """
        rows = [dict(event) if isinstance(event, Mapping) else {"item": event} for event in events]
        return self.call(
            "POST", "/events", {"user": user, "events": rows, "id": id}, may_retry=id is not None
        )

    def get_versions(self) -> dict[str, Any]:
        """Return which versions receive traffic, and problems with others. Raises ServerError if the request fails."""
        return self.call("GET", "/versions")

    def get_metrics(self) -> str:
        """Return the metrics page in Prometheus' text format. Raises ServerError if the server does not answer."""
        _, _, page = self._retry_request("GET", "/metrics", None, _MAX_TRIES)
        return page.decode()

    def is_ready(self) -> bool:
        """Return whether the server is ready to answer."""
        try:
            status, _, _ = self._send_request("GET", "/readyz", content=None)
            return status == 200
        except (OSError, http.client.HTTPException):
            return False

    def call(self, verb: str, path: str, body: Any = None, *, may_retry: bool = True) -> Any:
        """Send a request and return its answer as parsed JSON.

        Args:
            verb: The HTTP method.
            path: The path below the server's address.
            body: The content, which is sent as JSON.
            may_retry: Whether the request may be sent again when a connection breaks.

        Raises:
            ServerError: The server refused the request or did not answer.
        """
        content = None if body is None else json.dumps(body)
        status, headers, answer = self._retry_request(verb, path, content, _MAX_TRIES if may_retry else 1)
        try:
            parsed = json.loads(answer)
        except ValueError:
            parsed = {"error": {"kind": "no_json", "message": answer[:200].decode(errors="replace")}}
        if status != 200:
            problem = parsed.get("error", {}) if isinstance(parsed, dict) else {}
            retry_after = headers.get("retry-after")
            raise ServerError(
                problem.get("message", str(parsed)),
                status=status,
                kind=problem.get("kind", "unknown"),
                retry_s=float(retry_after) if retry_after else None,
            )
        return parsed

    def close(self) -> None:
        """Close the connection of this thread."""
        connection = self._local.__dict__.pop("connection", None)
        if connection is not None:
            connection.close()

    def _retry_request(
        self, verb: str, path: str, content: str | None, max_tries: int
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request, again when a connection breaks, and return what `_send_request` returns.

        Raises:
            ServerError: The server does not answer.
        """
        for tries_left in reversed(range(max_tries)):
            try:
                return self._send_request(verb, path, content)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if not tries_left:
                    raise ServerError(
                        f"{self._url.geturl()} does not answer: {error}", status=0, kind="unreachable"
                    ) from None
                time.sleep(0.1)
        raise AssertionError("max_tries is at least 1")

    def _send_request(
        self, verb: str, path: str, content: str | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request over this thread's connection, which is closed on an error.

        Returns:
            The HTTP status, the headers by lower-case name, and the content of the response.
        """
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection_class = (
                http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
            )
            connection = self._local.connection = connection_class(
                self._url.hostname or "", self._url.port, timeout=self._timeout_s
            )
        try:
            connection.request(verb, self._url.path.rstrip("/") + path, content, self._headers)
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, headers, response.read()
        except BaseException:
            self.close()
            raise


def _parse_recommendation(answer: dict[str, Any]) -> Recommendation:
    """Convert a parsed answer, from which "items" is removed."""
    items = [RecommendedItem(**item) for item in answer.pop("items")]
    return Recommendation(items, **answer)
