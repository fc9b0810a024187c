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


def test_the_processes_of_a_job_get_the_variables_that_are_given(monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    ensure_ray({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
    assert given["runtime_env"] == {"env_vars": {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}}
