"""Client: a typed caller of a server; the standard library alone, a connection a thread."""

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

_TRIES = 3


class ServerError(NonetError):
    """What a server refused; `status` of HTTP, `kind` for programs, `retry_s` where it said when to come again."""

    def __init__(self, message: str, status: int, kind: str, retry_s: float | None = None):
        super().__init__(message)
        self.status, self.kind, self.retry_s = status, kind, retry_s


@dataclass(frozen=True, slots=True)
class Item:
    """An item, its score in nats (None of a fall-back), and where it was asked for its title, the model's nats and its votes."""

    item: int | str
    score: float | None
    title: str | None = None
    own: float | None = None
    vote: float | None = None


@dataclass(frozen=True, slots=True)
class Recommended:
    """Items, best first; the version that answered, or the fall-back in its place and why."""

    items: list[Item]
    version: int | None
    fallback: str | None = None
    reason: str | None = None
    cold_start: bool = False
    unknown: list[int | str] = field(default_factory=list)
    scene: str | None = None
    history: list[str] | None = None


class Client:
    """Of the server at a URL. token: by default NONET_TOKEN, else NONET_READ_TOKEN; caller: a name that limits go by beside a
    token, and shares of traffic without a user."""

    def __init__(
        self, url: str, *, token: str | None = None, caller: str | None = None, timeout_s: float = 10.0
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000")
        self._parts, self._timeout_s = parts, timeout_s
        if token is None:
            token = os.environ.get(WRITE_TOKEN) or os.environ.get(READ_TOKEN)
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self._headers |= {"X-Caller": caller} if caller else {}
        self._local = threading.local()

    def recommend(
        self,
        user: int | str | None = None,
        *,
        history: Sequence[int | str] | None = None,
        k: int = 10,
        exclude: Sequence[int | str] = (),
        where: str | None = None,
        scene: str | None = None,
        deadline_ms: float | None = None,
        explain: bool = False,
    ) -> Recommended:
        """The k best items for a user, or for a history of item ids. Raises ServerError."""
        body = {
            "user": user,
            "history": history,
            "k": k,
            "exclude": list(exclude),
            "where": where,
            "scene": scene,
        }
        return _recommended(
            self.call("POST", "/recommend", body | {"deadline_ms": deadline_ms, "explain": explain})
        )

    def score(
        self,
        items: Sequence[int | str],
        user: int | str | None = None,
        *,
        history: Sequence[int | str] | None = None,
        explain: bool = False,
    ) -> Recommended:
        """Log-probabilities of items. Raises ServerError."""
        body = {"items": list(items), "user": user, "history": history, "explain": explain}
        return _recommended(self.call("POST", "/score", body))

    def post_events(
        self, user: int | str, events: Sequence[Mapping[str, Any] | int | str], id: str | None = None
    ) -> dict[str, Any]:
        """New events of a user, item ids or {"item", "time", "event", "values"}; once acknowledged they are on disk.

        With an id a post counts once, so it is sent again where a server went away. Raises ServerError."""
        sent = [dict(event) if isinstance(event, Mapping) else {"item": event} for event in events]
        return self.call("POST", "/events", {"user": user, "events": sent, "id": id}, again=id is not None)

    def versions(self) -> dict[str, Any]:
        """Which versions answer whom."""
        return self.call("GET", "/versions")

    def metrics(self) -> str:
        """The page that Prometheus reads."""
        return self._asked("GET", "/metrics", None)[2].decode()

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            return self._asked("GET", "/readyz", None)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def call(self, verb: str, path: str, body: Any = None, *, again: bool = True) -> Any:
        """One request, as JSON. `again`: whether it may be sent again where a connection broke. Raises ServerError."""
        content = None if body is None else json.dumps(body)
        for left in reversed(range(_TRIES if again else 1)):
            try:
                status, headers, answer = self._asked(verb, path, content)
                break
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if not left:
                    raise ServerError(
                        f"{self._parts.geturl()} does not answer: {error}", 0, "unreachable"
                    ) from None
                time.sleep(0.1)
        try:
            parsed = json.loads(answer)
        except ValueError:
            parsed = {"error": {"kind": "no_json", "message": answer[:200].decode(errors="replace")}}
        if status != 200:
            error = parsed.get("error", {}) if isinstance(parsed, dict) else {}
            retry = headers.get("retry-after")
            raise ServerError(
                error.get("message", str(parsed)),
                status,
                error.get("kind", "unknown"),
                float(retry) if retry else None,
            )
        return parsed

    def close(self) -> None:
        """Close this thread's connection."""
        connection = self._local.__dict__.pop("connection", None)
        if connection is not None:
            connection.close()

    def _asked(self, verb: str, path: str, content: str | None) -> tuple[int, Mapping[str, str], bytes]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            kind = (
                http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            )
            connection = self._local.connection = kind(
                self._parts.hostname or "", self._parts.port, timeout=self._timeout_s
            )
        try:
            connection.request(verb, self._parts.path.rstrip("/") + path, content, self._headers)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        except BaseException:
            self.close()
            raise


def _recommended(body: dict[str, Any]) -> Recommended:
    items = [Item(**item) for item in body.pop("items")]
    return Recommended(items, **body)
