"""A client of a cluster's dashboard: Ray's job client with a time limit for every request and one line for every error."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import ray
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from nonet.errors import ClusterUnreachable, ConfigError

_ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"  # takes precedence over the argument of Ray's client
_CONNECT_S, _ANSWER_S = 5.0, 60.0
_SUPERVISED_S, _POLL_S = 3.0, 0.3  # how long Ray watches a job after its end
logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)  # it reports each upload
_MAX_ROWS = 10_000  # the most rows that Ray's state API returns
_EXAMPLE = "such as http://127.0.0.1:8265"


class ClusterClient(JobSubmissionClient):
    """Requests to the dashboard of one cluster.

    Args:
        address: The URL of the dashboard.

    Attributes:
        address: The URL of the dashboard.

    Raises:
        ConfigError: The address is not a URL, or the cluster refuses the token.
        ClusterUnreachable: No Ray dashboard answers there.
    """

    def __init__(self, address: str):
        self.address = _normalise_url(address)
        with _use_address(self.address):
            try:
                super().__init__(self.address)
            except (RuntimeError, ValueError, KeyError, requests.RequestException) as error:
                raise ClusterUnreachable(
                    f"{self.address} is not the dashboard of a Ray cluster ({_shorten(error)}); "
                    f"give the URL that `ray start --head` prints, {_EXAMPLE}"
                ) from None

    def _do_request(
        self,
        method: str,
        endpoint: str,
        *,
        data: bytes | None = None,
        json_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> requests.Response:
        """Send a request as Ray's client does, but within a time limit.

        Raises:
            ConfigError: The cluster refuses the token.
            ClusterUnreachable: The cluster does not answer.
        """
        kwargs.setdefault("timeout", (_CONNECT_S, _ANSWER_S))
        try:
            return super()._do_request(method, endpoint, data=data, json_data=json_data, **kwargs)
        except AuthenticationError as error:
            problem = "wants a token" if "required" in str(error) else "refuses the token"
            raise ConfigError(
                f"the cluster at {self.address} {problem}; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token "
                "with which the cluster was started, unless ~/.ray/auth_token of this machine has it"
            ) from None
        except (
            requests.ConnectionError,
            requests.Timeout,
            requests.exceptions.ChunkedEncodingError,
        ) as error:
            reason = "does not answer" if isinstance(error, requests.Timeout) else "cannot be reached"
            raise ClusterUnreachable(
                f"the cluster at {self.address} {reason}; start one there (ray start --head), or give the URL of its "
                f"dashboard, {_EXAMPLE}"
            ) from None

    def check_versions(self) -> None:
        """Check that the cluster has the Ray and Python of this process.

        Raises:
            ConfigError: A version differs.
        """
        there = self._get_data("/api/v0/cluster_metadata")
        pairs = {
            "Ray": (ray.__version__, there["rayVersion"]),
            "Python": (_cut_patch(platform.python_version()), _cut_patch(there["pythonVersion"])),
        }
        for name, (own, other) in pairs.items():
            if own != other:
                raise ConfigError(
                    f"this machine has {name} {own}, and the cluster at {self.address} has {name} {other}; "
                    f"use an environment with {name} {other} here, or update the cluster"
                )

    def remove_job(self, job_id: str) -> None:
        """Remove an ended job from the cluster's list of jobs.

        Ray watches a job for about two seconds after its end. If the job is deleted meanwhile, Ray lists it again, as a failed
        job without an entrypoint, which would keep its id in use. It is then deleted again.
        """
        self.delete_job(job_id)
        deadline_s = time.monotonic() + _SUPERVISED_S
        while time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            if job_id in self.list_job_ids():
                self.delete_job(job_id)
                return

    def list_job_ids(self) -> set[str]:
        """Return the submission ids of all jobs of the cluster, of runs and others."""
        return {job.submission_id for job in self.list_jobs() if job.submission_id}

    def list_state(self, kind: str, **filters: str) -> list[dict[str, Any]]:
        """Return the rows of Ray's state API.

        Args:
            kind: The resource, such as "actors", "placement_groups" or "nodes".
            **filters: Values that fields of a row must equal.
        """
        params: list[tuple[str, str]] = [("detail", "1"), ("limit", str(_MAX_ROWS))]
        for key, value in filters.items():
            params += [("filter_keys", key), ("filter_predicates", "="), ("filter_values", value)]
        return self._get_data(f"/api/v0/{kind}", params=params)["result"]["result"]

    @asynccontextmanager
    async def open_log(
        self, source: Mapping[str, str], *, follow: bool = False, silence_s: float = _ANSWER_S
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a log file of a node from its beginning.

        Args:
            source: The parameters of Ray's log API that name the file.
            follow: Whether the response stays open and continues with what is written later.
            silence_s: Seconds without a byte after which reading fails.

        Raises:
            ConfigError: There is no such file.
        """
        params = {**source, "lines": "-1", **({"interval": "0.3"} if follow else {})}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silence_s)
        url = f"{self.address}/api/v0/logs/{'stream' if follow else 'file'}"
        ssl = True if self._ssl_context is None else self._ssl_context
        async with (
            aiohttp.ClientSession(headers=self._headers, cookies=self._cookies, timeout=timeout) as session,
            session.get(url, params=params, ssl=ssl) as response,
        ):
            if response.status != requests.codes.ok:
                reason = " ".join((await response.text()).split())[:200]
                raise ConfigError(f"the cluster at {self.address} has no such log: {reason}")
            yield response

    def read_log_end(self, source: Mapping[str, str], lines: int) -> str:
        """Return the last lines of a log file of a node. Raises ConfigError if there is no such file."""
        response = self._do_request("GET", "/api/v0/logs/file", params={**source, "lines": str(lines)})
        if response.status_code != requests.codes.ok:
            reason = " ".join(response.text.split())[:200]
            raise ConfigError(f"the cluster at {self.address} has no such log: {reason}")
        return response.text

    def _get_data(self, endpoint: str, **options: Any) -> Any:
        """Return the data of an answer of the dashboard. Raises ConfigError if it is an error."""
        response = self._do_request("GET", endpoint, **options)
        answer = response.json() if "json" in response.headers.get("Content-Type", "") else {}
        if response.status_code != requests.codes.ok or not answer.get("result"):
            reason = " ".join(str(answer.get("msg") or response.text).split())[:200]
            raise ConfigError(f"the cluster at {self.address} answers {response.status_code}: {reason}")
        return answer["data"]


def _normalise_url(address: str) -> str:
    """Return the URL of a dashboard without its final slash. Raises ConfigError if it is not a URL."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--address is {address!r}; it must be the URL of the cluster's dashboard, {_EXAMPLE}"
        )
    return address.rstrip("/")


@contextmanager
def _use_address(address: str) -> Iterator[None]:
    """Let Ray's client take this address; otherwise its variables take precedence over the argument."""
    before = os.environ.get(_ADDRESS_VARIABLE)
    os.environ[_ADDRESS_VARIABLE] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ADDRESS_VARIABLE]
        else:
            os.environ[_ADDRESS_VARIABLE] = before


def _cut_patch(version: str) -> str:
    """Return major and minor of a version, such as "3.11"."""
    return ".".join(version.split(".")[:2])


def _shorten(error: Exception) -> str:
    """Return the message of an error in one line of at most 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
