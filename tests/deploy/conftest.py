"""The small world of tests_ring.py, a small run with an app that answers from it, and the command line as fixtures."""

from __future__ import annotations

import sys

import pytest
from served_run import TrainedRun
from starlette.testclient import TestClient
from tests_ring import make_ring

from nonet.deploy import cli
from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.start import build_single_process_app


@pytest.fixture
def ring(tmp_path):
    """Make a folder with tables, ring.yaml and its reward file."""
    return make_ring(tmp_path)


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nonet", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


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
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
