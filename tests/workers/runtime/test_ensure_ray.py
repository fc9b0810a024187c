"""How a process joins or starts Ray."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from nonet.errors import ConfigError
from nonet.workers.runtime import ensure_ray


@pytest.mark.parametrize(
    "error", [Exception("The current node timed out during startup."), ConnectionError("no answer")]
)
def test_a_ray_that_does_not_start_is_one_line_whatever_ray_raises(
    monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def fail(**options: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=f"^Ray does not start .no RAY_ADDRESS is set.: .*{error}"):
        ensure_ray()


@pytest.mark.parametrize(("address", "attempts"), [("", 2), ("127.0.0.1:1", 1)])
def test_a_local_ray_that_does_not_start_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, address: str, attempts: int
):
    addresses = []

    def fail_once(**options: Any) -> None:
        addresses.append(options["address"])
        if len(addresses) == 1:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail_once)
    monkeypatch.setattr("nonet.workers.runtime.actors.check_ray_environment", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    if attempts == 1:
        with pytest.raises(ConfigError, match="Ray does not start"):
            ensure_ray()
    else:
        ensure_ray()
    assert addresses == [address or "local"] * attempts


def test_the_processes_of_a_job_get_the_variables_that_are_given(monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    ensure_ray({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    assert given["runtime_env"] == {"env_vars": {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}}
