"""A stand-in for a cluster's dashboard, and a real head with one, as fixtures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside the tests, as for the folders of tests/


@pytest.fixture
def dashboard(monkeypatch):
    """Start a stand-in for a cluster's dashboard."""
    from dashboard_standin import DashboardStandIn

    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    standin = DashboardStandIn()
    yield standin
    standin.close()


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Start a head of a cluster with a dashboard, in processes of its own."""
    from ray_head import RayHead

    with RayHead(tmp_path_factory.mktemp("head")) as head:
        yield head
