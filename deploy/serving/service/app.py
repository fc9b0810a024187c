"""The HTTP API of a `Service` with FastAPI, which provides an OpenAPI page; every failure is a typed JSON error."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from nonet.deploy.serving.access import Access, Callers
from nonet.deploy.serving.features import Refused, StorageFull
from nonet.deploy.serving.service.requests import (
    Event,
    EventsRequest,
    Failure,
    Listed,
    Posted,
    RecommendRequest,
    ScoreRequest,
    Text,
)
from nonet.deploy.serving.service.service import Service, TooMany, refused_status
from nonet.errors import NonetError
from nonet.suggest import suggest_sentence

MOST_BYTES = 2 << 20
"""Maximum size of a request's body."""
_EXAMPLES, _LONGEST_SEARCH, _MOST_FOUND = 6, 200, 100
_BODIES = {"/recommend": RecommendRequest, "/score": ScoreRequest, "/events": EventsRequest}
_FAILURES: dict[int | str, dict[str, Any]] = {
    code: {"model": Failure} for code in (400, 401, 413, 422, 429, 503, 507)
}


def make_app(service: Service, *, local: bool = True, proxies: Sequence[str] = ()) -> FastAPI:
    """Create the app.

    Args:
        service: The service that answers.
        local: Whether the server only listens on this machine; if not, changes need NONET_TOKEN.
        proxies: Addresses or networks of proxies whose `X-Forwarded-For` is trusted.
    """
    app = FastAPI(title="Nonet", description="Recommendations of a finished run.", responses=_FAILURES)
    app.state.service = service
    access, callers = Access.from_environment(local), Callers(proxies)

    def may_change(request: Request) -> None:
        if not access.may_change(_token(request)):
            raise HTTPException(
                401, "this request needs a token: send NONET_TOKEN as `Authorization: Bearer ...`"
            )

    def may_read(request: Request) -> None:
        if not access.may_read(_token(request)):
            raise HTTPException(
                401, "queries need a token: send NONET_READ_TOKEN as `Authorization: Bearer ...`"
            )

    def caller(request: Request) -> str:
        peer = request.client.host if request.client else "unknown"
        return callers.key(peer, request.headers, access.is_known(_token(request)))

    def hidden_history(request: Request, body: RecommendRequest | ScoreRequest, listed: Listed) -> Listed:
        """Remove the user's history unless the caller may see it or sent it with the request."""
        if body.history is None and not access.may_see_histories(_token(request)):
            listed.history = None
        return listed

    reads = [Depends(may_read)]

    @app.post("/recommend", dependencies=reads)
    async def recommend(body: RecommendRequest, request: Request, response: Response) -> Listed:
        """Recommend items for a user or a history."""
        answer = await service.recommend(body, caller(request), _spent(request), named=_name_of(request))
        return _named(hidden_history(request, body, answer), response)

    @app.post("/score", dependencies=reads)
    async def score(body: ScoreRequest, request: Request, response: Response) -> Listed:
        """Return log-probabilities of the given items."""
        answer = await service.score(body, caller(request), _spent(request), named=_name_of(request))
        return _named(hidden_history(request, body, answer), response)

    @app.post("/events", dependencies=[Depends(may_change)])
    async def events(body: EventsRequest, request: Request) -> Posted:
        """Store new events of a user; they are on disk and used by the next answer when this returns."""
        return await service.post(body, caller(request))

    @app.get("/items", dependencies=reads)
    async def items(title: Text, k: int = 10) -> dict[str, Any]:
        """Return items whose title contains these words, most popular first."""
        if not 1 <= len(title) <= _LONGEST_SEARCH or not 1 <= k <= _MOST_FOUND:
            raise Refused(
                "bad_search",
                f"title must have 1 to {_LONGEST_SEARCH} characters, and k must be 1 to {_MOST_FOUND}",
            )
        known = service.features.items
        places = await asyncio.to_thread(known.search, title, k)
        pairs = zip(known.ids(places), known.titles(places), strict=True)
        return {"items": [{"item": item, "title": text} for item, text in pairs]}

    @app.get("/examples", dependencies=reads)
    async def examples(request: Request) -> dict[str, Any]:
        """Return a few users of the data if the caller may see users' events."""
        seen = access.may_see_histories(_token(request))
        return {"users": service.features.example_users(_EXAMPLES) if seen else []}

    @app.get("/healthz")
    async def healthz() -> dict[str, bool]:
        """Return whether the process answers."""
        return {"ok": True}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, Any]:
        """Return whether a version is ready to answer; 503 with the reason if not."""
        reason = service.engines.unready()
        response.status_code = 200 if reason is None else 503
        answer = {"ready": reason is None, "version": service.engines.serving.default}
        return answer if reason is None else answer | {"reason": reason}

    @app.get("/versions", dependencies=reads)
    async def versions() -> dict[str, Any]:
        """Return which versions receive which traffic."""
        return service.versions()

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        return (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    @app.middleware("http")
    async def guarded(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        size = request.headers.get("content-length", "" if request.method == "POST" else "0")
        if not size.isdecimal():
            return _failure(411, "no_length", "send the length of the body as Content-Length")
        if int(size) > MOST_BYTES:
            return _failure(413, "too_large", f"a body has at most {MOST_BYTES} bytes")
        request.state.began = time.monotonic()
        try:
            response = await call(request)
        except Exception as error:  # an internal error: counted, and returned without a traceback
            response = _failure(503, "internal", type(error).__name__)
        verb = request.url.path.strip("/").split("/")[0]
        if request.method == "POST" and verb in ("recommend", "score", "events"):
            version = response.headers.get("x-version", "none")
            service.metrics.requests.labels(verb, str(response.status_code), version).inc()
        return response

    _handle_failures(app)
    return app


def _handle_failures(app: FastAPI) -> None:
    """Register handlers that convert errors to JSON responses."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return _failure(refused_status(error), error.kind, str(error))

    @app.exception_handler(TooMany)
    async def too_many(_: Request, error: TooMany) -> JSONResponse:
        return _failure(429, "too_many", str(error), {"Retry-After": str(max(1, math.ceil(error.retry_s)))})

    @app.exception_handler(StorageFull)
    async def storage_full(_: Request, error: StorageFull) -> JSONResponse:
        return _failure(507, "storage_full", str(error))

    @app.exception_handler(NonetError)
    async def nonet_error(_: Request, error: NonetError) -> JSONResponse:
        return _failure(503, type(error).__name__, " ".join(str(error).split()), {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = error.errors()
        first = next((each for each in errors if each.get("type") == "extra_forbidden"), errors[0])
        where = first.get("loc", ())[1:]
        place = ".".join(str(part) for part in where)
        if first.get("type") == "extra_forbidden":
            return _failure(422, "bad_request", _unknown_field(request.url.path, where, place)[:500])
        if not where and first.get("type") == "model_attributes_type":
            return _failure(422, "bad_request", "send a JSON object, with Content-Type: application/json")
        return _failure(422, "bad_request", f"{place}: {first.get('msg', 'not valid')}"[:500])

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return _failure(
            error.status_code,
            {401: "no_token", 404: "no_such_page"}.get(error.status_code, "refused"),
            str(error.detail),
        )


def _unknown_field(path: str, where: Sequence[Any], place: str) -> str:
    """Describe an unknown field and the fields that exist in its place."""
    model: Any = _BODIES.get(path.rstrip("/"))
    if model is EventsRequest and len(where) > 1 and where[0] == "events":
        model = Event
    known = list(model.model_fields) if model is not None else []
    return f"{place}: there is no such field; fields: {', '.join(known)}.{suggest_sentence(str(where[-1]), known)}"


def _failure(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"kind": kind, "message": message}}, status, headers)


def _named(listed: Listed, response: Response) -> Listed:
    """Return the answer after setting its version in a response header."""
    response.headers["x-version"] = "none" if listed.version is None else str(listed.version)
    return listed


def _token(request: Request) -> str:
    """Return the bearer token of a request; "" if it has none."""
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def _name_of(request: Request) -> str:
    """Return the name that a caller gives itself; "" if it gives none."""
    return request.headers.get("x-caller", "")[:128]


def _spent(request: Request) -> float:
    """Return the seconds since the request arrived."""
    return time.monotonic() - request.state.began
