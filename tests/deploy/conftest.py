"""The small world of tests_ring.py, and a small run with an app that answers from it, as fixtures."""

from __future__ import annotations

import pytest
from served_run import TrainedRun
from starlette.testclient import TestClient
from tests_ring import make_ring

from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app


@pytest.fixture
def ring(tmp_path):
    """Make a folder with tables, ring.yaml and its reward file."""
    return make_ring(tmp_path)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = TrainedRun(tmp_path_factory.mktemp("served"))
    made.commit(6)
    return made


@pytest.fixture(scope="module")
def app(served):
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0), True)
    yield app
    app.state.service.engines.close()


@pytest.fixture(scope="module")
def client(app):
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client
