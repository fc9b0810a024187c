"""The HTTP API of a `RecommendationService` with FastAPI, which provides an OpenAPI page; every failure is a typed JSON error."""

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

from nonet.deploy.opened import Refused
from nonet.deploy.serving.access import READ_TOKEN, WRITE_TOKEN, AccessPolicy, CallerResolver
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
from nonet.deploy.serving.service.service import RecommendationService, TooManyRequests, get_refused_status
from nonet.errors import NonetError
from nonet.journal import StorageFull
from nonet.suggest import suggest_sentence

_LOCAL_ADDRESSES = ("127.0.0.1", "::1")
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
_PAGES = ("/", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
_UNLIMITED_PATHS = (*_PAGES, "/metrics", "/healthz", "/readyz")  # which have no rate limit
_MAX_LENGTH_DIGITS = 20  # of Content-Length
MAX_BODY_BYTES = 2 << 20
"""Maximum size of a request's body."""
_EXAMPLE_USERS = 6  # number of users that the page offers as examples
_MAX_MESSAGE_CHARS = 500
_MAX_SEARCH_CHARS, _MAX_SEARCH_ITEMS = 200, 100  # limits of a search for items by title
_BODY_MODELS = {"/recommend": RecommendRequest, "/score": ScoreRequest, "/events": EventsRequest}
_FAILURES: dict[int | str, dict[str, Any]] = {
    code: {"model": Failure} for code in (400, 401, 403, 409, 413, 422, 429, 503, 507)
}


def make_app(service: RecommendationService, *, local: bool = True, proxies: Sequence[str] = ()) -> FastAPI:
    """Create the app.

    Args:
        service: The service that answers the requests.
        local: Whether the server only listens on this machine; if not, changes need NONET_TOKEN.
        proxies: Addresses or networks of proxies whose `X-Forwarded-For` is trusted.
    """
    app = FastAPI(title="Nonet", description="Recommendations of a finished run.", responses=_FAILURES)
    app.state.service = service
    access, callers = AccessPolicy.from_environment(local), CallerResolver(proxies)

    # All connections to a local server are of this machine. The peer that uvicorn reports may be one that a page has named.
    has_any_name = access.needs_tokens or any(map(callers.is_trusted, _LOCAL_ADDRESSES))

    def may_be_asked_by(host: str) -> bool:
        """Return whether a request to a host may be answered: a page of another site reaches a local server by another name."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        return has_any_name or name in _LOCAL_NAMES

    def check_may_change(request: Request) -> None:
        """Raise a 401 error if the request's token does not allow it to post events."""
        if not access.may_change(_get_token(request)):
            raise HTTPException(
                401, "this request needs a token: send NONET_TOKEN as `Authorization: Bearer ...`"
            )

    def check_may_read(request: Request) -> None:
        """Raise a 401 error if the request's token does not allow it to make queries."""
        if not access.may_read(_get_token(request)):
            raise HTTPException(
                401, "queries need a token: send NONET_READ_TOKEN as `Authorization: Bearer ...`"
            )

    def get_caller(request: Request) -> str:
        """Return the key by which the rate limit of the request's caller is counted."""
        peer = request.client.host if request.client else "unknown"
        return callers.choose_limit_key(peer, request.headers, access.is_known(_get_token(request)))

    def hide_history(request: Request, body: RecommendRequest | ScoreRequest, listed: Listed) -> Listed:
        """Return the response after removing the user's history unless the caller may see it or sent it."""
        if body.history is None and body.like is None and not access.may_see_histories(_get_token(request)):
            listed.history = None
        return listed

    needs_read_access = [Depends(check_may_read)]

    @app.post("/recommend", dependencies=needs_read_access)
    async def recommend(body: RecommendRequest, request: Request, response: Response) -> Listed:
        """Recommend items for a user or a history."""
        answer = await service.recommend(
            body, _measure_elapsed_s(request), caller_name=_get_caller_name(request)
        )
        return _set_version_header(hide_history(request, body, answer), response)

    @app.post("/score", dependencies=needs_read_access)
    async def score(body: ScoreRequest, request: Request, response: Response) -> Listed:
        """Return log-probabilities of the given items."""
        answer = await service.score(body, _measure_elapsed_s(request), caller_name=_get_caller_name(request))
        return _set_version_header(hide_history(request, body, answer), response)

    @app.post("/events", dependencies=[Depends(check_may_change)])
    async def events(body: EventsRequest) -> Posted:
        """Store new events of a user; they are on disk and used by the next answer when this returns."""
        return await service.post(body)

    @app.get("/items", dependencies=needs_read_access)
    async def items(title: Text, k: int = 10) -> dict[str, Any]:
        """Return items whose title contains these words, most popular first."""
        if not 1 <= len(title) <= _MAX_SEARCH_CHARS or not 1 <= k <= _MAX_SEARCH_ITEMS:
            raise Refused(
                "bad_search",
                f"title must have 1 to {_MAX_SEARCH_CHARS} characters, and k must be 1 to {_MAX_SEARCH_ITEMS}",
            )
        catalogue = service.features.items
        item_indices = await asyncio.to_thread(catalogue.search, title, k)
        pairs = zip(catalogue.get_ids(item_indices), catalogue.get_titles(item_indices), strict=True)
        return {"items": [{"item": item_id, "title": item_title} for item_id, item_title in pairs]}

    @app.get("/examples", dependencies=needs_read_access)
    async def examples(request: Request) -> dict[str, Any]:
        """Return a few users of the data if the caller may see users' events."""
        allowed = access.may_see_histories(_get_token(request))
        return {"users": service.features.list_example_users(_EXAMPLE_USERS) if allowed else []}

    @app.get("/healthz")
    async def healthz() -> dict[str, bool]:
        """Return whether the process answers."""
        return {"ok": True}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, Any]:
        """Return whether a version is ready to answer; 503 with the reason if not."""
        reason = service.explain_unready()
        response.status_code = 200 if reason is None else 503
        answer = {"ready": reason is None, "version": service.engines.serving.default}
        return answer if reason is None else answer | {"reason": reason}

    @app.get("/versions", dependencies=needs_read_access)
    async def versions() -> dict[str, Any]:
        """Return which versions receive which traffic."""
        return service.describe_versions()

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def serve_page() -> str:
        return (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    def refuse_by_headers(request: Request) -> JSONResponse | None:
        """Return why the headers of a request are refused; None if they are not."""
        # A POST without the header is refused; other methods have no body.
        content_length = request.headers.get("content-length", "" if request.method == "POST" else "0")
        # A body in chunks has any length, whatever the header says.
        if not content_length.isdecimal() or "transfer-encoding" in request.headers:
            return _make_failure(
                411, "no_length", "send the length of the body as Content-Length, without Transfer-Encoding"
            )
        if len(content_length) > _MAX_LENGTH_DIGITS or int(content_length) > MAX_BODY_BYTES:
            return _make_failure(413, "too_large", f"a body has at most {MAX_BODY_BYTES} bytes")
        if not may_be_asked_by(request.headers.get("host", "")):
            return _make_failure(
                403,
                "foreign_host",
                "a server without tokens answers to 127.0.0.1, localhost and [::1] only, so that no page on the web can read it "
                f"through a browser; set {WRITE_TOKEN} and {READ_TOKEN}, or name your proxy on this machine in `proxies`",
            )
        return None

    @app.middleware("http")
    async def guard_request(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        request.state.arrival_s = time.monotonic()
        try:
            if request.url.path not in _UNLIMITED_PATHS:
                service.check_rate(get_caller(request))
            response = refuse_by_headers(request) or await call_next(request)
        except TooManyRequests as error:
            response = _make_too_many_failure(error)
        except Exception as error:  # an internal error: counted, and returned without a traceback
            response = _make_failure(503, "internal", type(error).__name__)
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
    async def handle_refused(_: Request, error: Refused) -> JSONResponse:
        return _make_failure(get_refused_status(error), error.kind, str(error)[:_MAX_MESSAGE_CHARS])

    @app.exception_handler(TooManyRequests)
    async def handle_too_many(_: Request, error: TooManyRequests) -> JSONResponse:
        return _make_too_many_failure(error)

    @app.exception_handler(StorageFull)
    async def handle_storage_full(_: Request, error: StorageFull) -> JSONResponse:
        return _make_failure(507, "storage_full", str(error))

    @app.exception_handler(NonetError)
    async def handle_nonet_error(_: Request, error: NonetError) -> JSONResponse:
        return _make_failure(503, type(error).__name__, " ".join(str(error).split()), {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def handle_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = error.errors()
        # A misspelt field is reported first, because it often explains the other problems.
        first = next((each for each in problems if each.get("type") == "extra_forbidden"), problems[0])
        field_path = first.get("loc", ())[1:]  # without the leading "body"
        field_name = ".".join(str(part) for part in field_path)
        if first.get("type") == "extra_forbidden":
            message = _describe_unknown_field(request.url.path, field_path, field_name)[:_MAX_MESSAGE_CHARS]
            return _make_failure(422, "bad_request", message)
        if not field_path and first.get("type") == "model_attributes_type":
            return _make_failure(
                422, "bad_request", "send a JSON object, with Content-Type: application/json"
            )
        return _make_failure(
            422, "bad_request", f"{field_name}: {first.get('msg', 'not valid')}"[:_MAX_MESSAGE_CHARS]
        )

    @app.exception_handler(HTTPException)
    async def handle_http_error(_: Request, error: HTTPException) -> JSONResponse:
        return _make_failure(
            error.status_code,
            {401: "no_token", 404: "no_such_page"}.get(error.status_code, "refused"),
            str(error.detail),
        )


def _describe_unknown_field(url_path: str, field_path: Sequence[Any], field_name: str) -> str:
    """Return a message that names an unknown field of a body and the fields that exist in its place."""
    model: Any = _BODY_MODELS.get(url_path.rstrip("/"))
    if model is EventsRequest and len(field_path) > 1 and field_path[0] == "events":
        model = Event
    known = list(model.model_fields) if model is not None else []
    suggestion = suggest_sentence(str(field_path[-1]), known)
    return f"{field_name}: there is no such field; fields: {', '.join(known)}.{suggestion}"


def _make_failure(
    status: int, kind: str, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return the response of a failure, whose body is a `Failure`."""
    return JSONResponse({"error": {"kind": kind, "message": message}}, status, headers)


def _make_too_many_failure(error: TooManyRequests) -> JSONResponse:
    """Return the response to a request beyond a limit."""
    return _make_failure(429, "too_many", str(error), {"Retry-After": str(max(1, math.ceil(error.retry_s)))})


def _set_version_header(listed: Listed, response: Response) -> Listed:
    """Set the header `x-version` of a response to the version of an answer, and return the answer."""
    response.headers["x-version"] = "none" if listed.version is None else str(listed.version)
    return listed


def _get_token(request: Request) -> str:
    """Return the bearer token of a request; "" if it has none."""
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def _get_caller_name(request: Request) -> str:
    """Return the name that a caller gives itself; "" if it gives none."""
    return request.headers.get("x-caller", "")[:128]


def _measure_elapsed_s(request: Request) -> float:
    """Return the seconds since the request arrived."""
    return time.monotonic() - request.state.arrival_s
