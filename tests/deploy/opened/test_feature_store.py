"""Users' events in a Redis that features read by key: the same answers, and marked fall-backs while it is away."""

from __future__ import annotations

import pytest
from redis_server import REDIS, RedisServer
from served_run import ask, items
from starlette.testclient import TestClient

from nonet.deploy.opened import RequestFeatures
from nonet.deploy.serving.service import (
    EnginePool,
    FallbackRecommender,
    RecommendationService,
    ServeConfig,
    ServerMetrics,
    ServicesConfig,
    make_app,
)

pytestmark = pytest.mark.skipif(not REDIS, reason="no redis-server")


@pytest.fixture
def redis(tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def test_histories_out_of_a_store_answer_alike_and_its_end_is_a_marked_fall_back(client, served, redis):
    opened = served.open()
    features = RequestFeatures.from_run(opened, posts=False, store=redis.address)
    engines = EnginePool(opened, follow=False)
    fallback, settings = (
        FallbackRecommender(opened.corpus, features.items),
        ServeConfig(deadline_s=20.0).make_service_settings(),
    )
    app = make_app(RecommendationService(features, engines, fallback, settings, ServerMetrics()))
    with TestClient(app, base_url="http://localhost") as stored:
        for user in (101, 105, 999):
            assert ask(stored, user=user, k=5) == ask(client, user=user, k=5)
        assert features.histories._stored is not None
        redis.kill()
        away = ask(stored, user=101, k=5)
        assert (away["fallback"], away["reason"]) == ("popularity", "features are away")
        assert len(set(items(away))) == 5
        assert ask(stored, history=[1001, 1002], k=5)["fallback"] is None
        redis.start()
        assert ask(stored, user=101, k=5) == ask(client, user=101, k=5)
    engines.close()


def test_the_store_is_named_in_the_services():
    assert ServicesConfig(features={"store": "redis://h:1/n"}).features.store == "redis://h:1/n"
