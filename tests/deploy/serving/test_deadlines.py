"""A request's deadline counts from its arrival, and a server whose queue has died says that it is not ready."""

from __future__ import annotations

import asyncio
import time

import pytest
from served_run import TrainedRun, ask
from starlette.testclient import TestClient

from nonet.deploy.serving.service import ServeConfig
from nonet.deploy.serving.service.requests import RecommendRequest
from nonet.deploy.serving.start import build_single_process_app


@pytest.fixture
def app(tmp_path):
    served = TrainedRun(tmp_path, memory=False)
    served.commit(1)
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0), True)
    yield app
    app.state.service.engines.close()


def test_what_the_features_took_counts_against_the_deadline(app, monkeypatch):
    features = app.state.service.features
    right = features.prepare_list_question

    def slow(*arguments, **options):
        time.sleep(0.2)
        return right(*arguments, **options)

    monkeypatch.setattr(features, "prepare_list_question", slow)
    with TestClient(app, base_url="http://localhost") as client:
        assert ask(client, user=103, k=3, deadline_ms=150)["reason"] == "deadline"
        assert ask(client, user=103, k=3, deadline_ms=5000)["fallback"] is None


def test_features_elsewhere_that_are_late_are_not_waited_for(app, monkeypatch):
    import asyncio

    features = app.state.service.features

    async def slow(*arguments, **options):
        await asyncio.sleep(3)

    monkeypatch.setattr(features, "prepare_list_question", slow)
    with TestClient(app, base_url="http://localhost") as client:
        began = time.monotonic()
        answer = ask(client, user=103, k=3, deadline_ms=200)
        assert time.monotonic() - began < 2
    assert (answer["fallback"], answer["reason"]) == ("popularity", "deadline")


def test_a_server_whose_queue_has_died_is_not_ready_and_still_answers(app):
    engines = app.state.service.engines
    queue = engines.lanes[1].queue
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/readyz").json() == {"ready": True, "version": 1}

        def dies(questions):
            raise SystemExit

        queue._answer = dies
        answer = ask(client, user=103, k=3, deadline_ms=3000)
        assert answer["reason"] == "QueueDied"
        assert len(answer["items"]) == 3
        ready = client.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["reason"] == "the queue of version 1 has died"
        assert ask(client, user=103, k=3)["reason"] == "QueueDied"


def test_time_before_the_service_counts_against_the_deadline(tmp_path):
    served = TrainedRun(tmp_path, memory=False)
    served.publish()
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0), True)
    service = app.state.service
    with TestClient(app, base_url="http://localhost") as client:
        ask(client, user=103, k=3)
        request = RecommendRequest(user="103", k=3)
        listed = asyncio.run(service.recommend(request, spent_s=100.0))
        assert (listed.version, listed.reason) == (None, "deadline")
    service.engines.close()
