"""Rewards that are computed outside of Nonet: by an HTTP server, or by a Ray actor that is already running.

    rewards:
      fresh: {use: "http://scores:8080/fresh", columns: [price], token: FRESH_TOKEN}
      margin: {use: actor://pricing/margin, columns: [price]}

Both receive a message with `uid`, `user_id` and `scene` [U], `item_id`, `valid` and `logp` [U, W] (log-probabilities of items in
nats), `history` and `target` (one list per user), `step`, and the requested item columns in `columns`. Both return scores [U, W]:
a server as JSON, `{"scores": [[...]]}`, and an actor as any value that a reward may return. The actor's method is `score`, or the
one named in `actor://namespace/name/method`. If a prompt is sent again, it has the same `uid`.

Redirects are not followed, because urllib would send the token to their target and turn a POST into a GET. The proxy variables of
the environment count, except for addresses of this machine.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import urljoin, urlsplit, urlunsplit

import numpy as np

from nonet.contracts import check_class, find_entry_point
from nonet.errors import ConfigError, DataError
from nonet.plugins import load_heavy
from nonet.rl.rewards.base import Reward
from nonet.rl.rewards.checks import Unreachable
from nonet.types import Jagged, Rollouts

SCHEMES = {
    "http": "nonet.rl.rewards.remote:HttpReward",
    "https": "nonet.rl.rewards.remote:HttpReward",
    "actor": "nonet.rl.rewards.actor:ActorReward",
}
_GROUP = "nonet.reward_schemes"  # entry points of other packages: the name is a URL scheme, the value a subclass of Reward
_RETRIED_CODES = (429, 502, 503, 504)  # status codes after which a request is sent again later
_SHOWN_CHARS = 120  # number of characters of a response that an error shows


class HttpReward(Reward):
    """A reward that calls an HTTP server by POST.

    Args:
        columns: Item columns that are sent with the rollouts.
        token: Name of the environment variable with the bearer token; None sends no token.
    """

    url: ClassVar[str] = ""  # set in the subclass that `make_reward_class` creates
    concurrent = True

    def __init__(self, columns: Sequence[str] = (), token: str | None = None):
        self.columns, self._token_variable = list(columns), token
        if token is not None and not os.environ.get(token):
            raise ConfigError(f"{self.url}: token: the environment has no {token} in the reward's process")

    @classmethod
    def check_url(cls, url: str, title: str) -> None:
        """Raise ConfigError if an address has no host or no valid port."""
        try:
            parts = urlsplit(url)
            is_valid = bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ConfigError(f"{title}: {url} must be http://HOST:PORT/PATH")

    @classmethod
    def check_reachable(cls, title: str, timeout_s: float) -> None:
        """Raise Unreachable if nothing accepts a connection at the address, or at the proxy through which it is asked."""
        proxy = _find_proxy(cls.url)
        parts = urlsplit(cls.url if proxy is None else proxy)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout_s).close()
        except OSError as error:
            next_step = "; start the server" if proxy is None else _describe_proxy(cls.url)
            raise Unreachable(f"{title}: {cls.url} cannot be reached: {error}{next_step}") from None

    def score(self, r: Rollouts) -> Any:
        """Post the rollouts to the server and return its scores."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token_variable:
            headers["Authorization"] = f"Bearer {os.environ[self._token_variable]}"
        body = json.dumps(_to_json(make_message(r, self.columns))).encode()
        request = urllib.request.Request(self.url, body, headers, method="POST")
        return _parse_scores(self.url, self._send(request))

    def _send(self, request: urllib.request.Request) -> bytes:
        """Send a request and return the body of the response.

        Raises:
            Unreachable: The server cannot be reached, or asks to try again later.
            DataError: The server answered with another error, or not in time.
        """
        through = _describe_proxy(self.url)
        try:
            with _make_opener(_find_proxy(self.url)).open(request, timeout=self.timeout_s) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if 300 <= error.code < 400:
                raise DataError(
                    f"{self.url} answered {error.code}: {_describe_redirect(self.url, error)}{through}"
                ) from None
            error_type = Unreachable if error.code in _RETRIED_CODES else DataError
            raise error_type(f"{self.url} answered {error.code}: {_shorten(error.read())}{through}") from None
        except TimeoutError:
            raise DataError(f"{self.url} has not answered within {self.timeout_s:g} s{through}") from None
        except OSError as error:
            reason = getattr(error, "reason", error)  # urllib wraps the timeout of a connect in a URLError
            if isinstance(reason, TimeoutError):
                raise DataError(f"{self.url} has not answered within {self.timeout_s:g} s{through}") from None
            raise Unreachable(f"{self.url} cannot be reached: {reason}{through}") from None


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Makes urllib raise HTTPError for every redirect."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Return no request."""


@functools.lru_cache
def _make_opener(proxy: str | None) -> urllib.request.OpenerDirector:
    """Return an opener that sends all requests through a proxy, or all directly, and follows no redirect."""
    proxies = {} if proxy is None else {"http": proxy, "https": proxy}
    return urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _RefuseRedirects)


def _find_proxy(url: str) -> str | None:
    """Return the proxy that the environment names for an address; None if it is asked directly, as this machine always is."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost" or host.endswith(".localhost")
    proxy = urllib.request.getproxies().get(parts.scheme)
    if is_local or not proxy or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _describe_proxy(url: str) -> str:
    """Return a clause for messages that names the proxy through which an address is asked, without its password; "" for none."""
    proxy = _find_proxy(url)
    if proxy is None:
        return ""
    parts = urlsplit(url)
    address = urlsplit(proxy).netloc.rpartition("@")[2]
    return (
        f"; it was asked through the proxy {address} of {parts.scheme}_proxy, which may be the one that answers or fails: "
        f"no_proxy={parts.hostname} asks it directly"
    )


def _describe_redirect(url: str, error: urllib.error.HTTPError) -> str:
    """Return a clause that names the target of a redirect, without what it may have after `?`."""
    location = error.headers.get("Location")
    if not location:
        return "a redirect without a target"
    target = urlsplit(urljoin(url, location))
    shown = urlunsplit((target.scheme, target.netloc.rpartition("@")[2], target.path, "", ""))
    return f"it redirects to {_shorten(shown.encode())}, and redirects are not followed; if that is the service, use that address"


def make_reward_class(use: str, title: str) -> type[Reward]:
    """Create the reward class for an address; its attribute `url` is the address.

    Args:
        use: The address, as in the scenario.
        title: How messages name the reward.

    Raises:
        ConfigError: The scheme is unknown or registered twice, or the address or the class is invalid.
    """
    scheme = use.partition("://")[0]
    entry_point = find_entry_point(scheme, _GROUP, f"reward scheme {scheme!r}", SCHEMES)
    if entry_point is None and scheme not in SCHEMES:
        raise ConfigError(
            f"{title}: no reward has the scheme {scheme}://; supported are http://, https:// and actor://namespace/name"
        )
    cls = load_heavy(SCHEMES[scheme] if entry_point is None else entry_point.value)
    if entry_point is not None:
        check_class(cls, Reward, f"reward scheme {scheme!r}", "docs/reference/rewards.md")
    check_url = getattr(cls, "check_url", None)
    if check_url is not None:
        check_url(use, title)
    return type(cls.__name__, (cls,), {"url": use})


def make_message(r: Rollouts, columns: Sequence[str]) -> dict[str, Any]:
    """Build the message of rollouts: arrays with one row per user, and ragged values as one list of arrays per user."""
    array_fields = ("uid", "user_id", "scene", "item_id", "valid")
    message: dict[str, Any] = {name: np.asarray(getattr(r, name)) for name in array_fields}
    message["logp"] = np.where(r.valid, np.asarray(r.logp, np.float64).sum(-1), 0.0)
    message |= {} if r.added is None else {"added": r.added}
    message |= {name: _split_rows(ragged) for name, ragged in (("history", r.history), ("target", r.target))}
    return message | {"step": r.step, "columns": {name: r[name] for name in columns}}


def _split_rows(ragged: Jagged) -> list[np.ndarray]:
    """Return one array per user."""
    return [np.asarray(ragged[user]) for user in range(len(ragged))]


def _to_json(value: Any) -> Any:
    """Convert arrays in nested dicts and lists to lists for JSON; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: _to_json(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_to_json(member) for member in value]
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        return np.where(np.isfinite(value), value, None).tolist()  # pyright: ignore[reportArgumentType, reportCallIssue]
    return value.tolist()


def _parse_scores(url: str, body: bytes) -> Any:
    """Return the scores in the body of an HTTP response as a float64 array, with NaN for null.

    Raises:
        DataError: The body is not JSON, or has no list of lists of numbers.
    """
    try:
        scores = json.loads(body)
    except ValueError:
        raise DataError(f"{url} answered something other than JSON: {_shorten(body)}") from None
    if isinstance(scores, dict):
        if "scores" not in scores:
            raise DataError(f"{url} answered without `scores`: {_shorten(body)}")
        scores = scores["scores"]
    invalid_error = DataError(
        f"{url} answered `scores` that are not a list of lists of numbers, [users, beams]: {_shorten(body)}"
    )
    if not _contains_only_numbers(scores):  # NumPy would convert the text "1" to a number
        raise invalid_error
    try:
        return np.array(scores, np.float64)  # null becomes NaN
    except (TypeError, ValueError, OverflowError):
        raise invalid_error from None


def _contains_only_numbers(value: Any) -> bool:
    """Return whether nested lists contain only numbers, booleans and nulls."""
    if isinstance(value, list):
        return all(map(_contains_only_numbers, value))
    return value is None or isinstance(value, int | float)


def _shorten(body: bytes) -> str:
    """Return the start of a response on one line and in quotation marks, for an error message."""
    # A character has at most 4 bytes in UTF-8.
    text = " ".join(body[: 4 * _SHOWN_CHARS].decode("utf-8", "replace").split())
    return repr(text[:_SHOWN_CHARS] + ("..." if len(text) > _SHOWN_CHARS else ""))
