"""Services as deployments of their own on a real Ray Serve, and replicas that are killed while they answer."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request

import pytest
import yaml
from killed_services import Processes, schedule
from starlette.testclient import TestClient

from nonet.deploy.serving.apart import build_deployments, write_manifest
from nonet.deploy.serving.service import ScalingConfig, ServeConfig, ServicesConfig
from nonet.errors import ConfigError

NAMES = ("Access", "Features", "Engine")


@pytest.fixture(scope="module")
def url(served, ray_local):
    """Start the three deployments behind an address."""
    from ray import serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    served.open().publish_newest()
    small = {"cpus": 0.1}
    settings = ServeConfig(
        deadline_s=2.0,
        services=ServicesConfig(access=small, features=small, engine={"cpus": 0.1, "replicas": 2}),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    serve.run(
        build_deployments(serve, str(served.folder.path), settings, True, {"OMP_NUM_THREADS": "1"}),
        name="nonet",
    )
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def asked(url, path="/recommend", within=20.0, **body):
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=within) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read()  # the proxy's own words are no JSON
        return error.code, json.loads(text) if text.startswith(b"{") else {}


@pytest.mark.slow
def test_services_apart_answer_as_one_process_does(url, served):
    from nonet.deploy.serving.start import build_single_process_app

    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0, follow=False), True)
    with TestClient(app, base_url="http://localhost") as client:
        for user in (101, 105, 999):
            here = client.post("/recommend", json={"user": user, "k": 5}).json()
            status, there = asked(url, user=user, k=5)
            assert status == 200
            assert there["version"] == here["version"]
            assert there["fallback"] is None
            assert [row["item"] for row in there["items"]] == [row["item"] for row in here["items"]]
            scores = [[row["score"] for row in answer["items"]] for answer in (here, there)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    app.state.service.engines.close()
    assert asked(url, user=101, k=10**6) == asked(url, user=101, k=10**6)
    assert asked(url, user=101, k=10**6)[1]["error"]["kind"] == "bad_k"
    status, scored = asked(url, "/score", user=101, items=[1001, 77])
    assert status == 200
    assert scored["unknown"] == [77]


def killed(name, rng):
    """Kill a replica of a service at once, as SIGKILL does, even one that is just being started."""
    import ray

    until = time.monotonic() + 60
    while True:
        there = ray.util.list_named_actors(all_namespaces=True)
        names = [actor["name"] for actor in there if f"#{name}#" in actor["name"]]
        if names:
            break
        assert time.monotonic() < until, f"no replica of {name} came back"
        time.sleep(0.1)
    ray.kill(ray.get_actor(names[int(rng.integers(len(names)))], namespace="serve"), no_restart=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_replicas_lose_no_acknowledged_event_and_answers_go_on(url, served, seed):
    nothing_was_lost(served, seed, schedule(lambda path, body: asked(url, path, **body), killed, seed, NAMES))


@pytest.fixture(scope="module")
def processes(served, tmp_path_factory):
    """Features and two engines as forked processes, and access in this one."""
    served.open().publish_newest()
    made = Processes(served.folder.path, tmp_path_factory.mktemp("services"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def access(served, processes):
    from nonet.deploy.serving.apart.deployments import build_access_app

    app = build_access_app(
        str(served.folder.path),
        ServeConfig(deadline_s=2.0),
        True,
        *map(processes.handle, ("Features", "Engine")),
    )
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client
    app.state.service.engines.close()


@pytest.mark.parametrize("seed", range(4))
def test_killed_processes_lose_no_acknowledged_event_and_answers_go_on(access, processes, served, seed):
    def ask(path, body):
        answer = access.post(path, json=body)
        return answer.status_code, answer.json()

    nothing_was_lost(served, seed + 100, schedule(ask, processes.kill, seed + 100, ("Features", "Engine")))


class Silent:
    """A handle of a service that does not answer."""

    def __getattr__(self, name):
        return self

    def remote(self, *_, **__):
        return self

    def result(self, timeout_s):
        raise TimeoutError

    def __await__(self):
        return asyncio.sleep(60).__await__()


def test_a_post_whose_service_does_not_answer_is_503_and_not_said_to_be_lost(served, monkeypatch):
    from nonet.deploy.serving.apart import remote
    from nonet.deploy.serving.apart.deployments import build_access_app

    monkeypatch.setattr(remote, "_POST_TIMEOUT_S", 0.05)
    served.open().publish_newest()
    app = build_access_app(str(served.folder.path), ServeConfig(), True, Silent(), Silent())
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        answer = client.post("/events", json={"user": 103, "events": [{"item": 1001}], "id": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["kind"] == "Away"
        assert "nothing was stored" not in answer.text
        listed = client.post("/recommend", json={"user": 103, "k": 3, "deadline_ms": 200}).json()
        assert (listed["fallback"], len(listed["items"])) == ("popularity", 3)
    app.state.service.engines.close()


class Answering(Silent):
    """A handle of engines that have no problem."""

    def result(self, timeout_s):
        return {}, {}


def test_a_service_that_no_longer_knows_what_is_served_is_not_ready_and_hides_what_it_did(served):
    from nonet.deploy.serving.apart.remote import RemoteEnginePool

    served.open().publish_newest()
    registry = served.open().registry
    before = registry.withdraw({"1001"})
    engines = RemoteEnginePool(served.open(), Answering())
    path, away = registry.root / "serving.json", registry.root / "away"
    path.rename(away)
    ends = time.monotonic() + 10
    while engines.explain_unready() is None and time.monotonic() < ends:
        time.sleep(0.005)
    assert "serving.json is missing" in engines.explain_unready()
    assert engines.serving == before
    away.rename(path)
    while engines.explain_unready() is not None and time.monotonic() < ends:
        time.sleep(0.005)
    assert engines.explain_unready() is None
    engines.close()
    registry.withdraw(set())


def nothing_was_lost(served, seed, came):
    acknowledged, answered, wrong = came
    assert not wrong
    assert 200 in answered
    journal = (served.open().beside / "events.jsonl").read_text().splitlines()
    ids = [body["id"] for body in map(json.loads, journal) if body["user"] == f"new-{seed}"]
    assert len(ids) == len(set(ids))
    assert len(ids) >= len(acknowledged)


def test_a_manifest_names_the_run_and_the_services(tmp_path):
    config = {"services": {"engine": {"gpus": 1, "autoscaling": {"min": 1, "max": 4}}}, "deadline_s": 0.5}
    text = write_manifest(tmp_path / "service.yaml", "/runs/r1", config).read_text()
    _, body = yaml.safe_load_all(text)
    assert body["kind"] == "RayService"
    app = yaml.safe_load(body["spec"]["serveConfigV2"])["applications"][0]
    assert app["args"]["run"] == "/runs/r1"
    assert ServeConfig(**app["args"]["config"]).services.engine.autoscaling == ScalingConfig(min=1, max=4)
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(yaml.safe_load(body["spec"]["serveConfigV2"]))
    groups = body["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    engine = next(group for group in groups if group["groupName"] == "engine")
    assert engine["maxReplicas"] == 4
    assert engine["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    with pytest.raises(ConfigError, match="add other resources"):
        write_manifest(tmp_path / "x.yaml", "/runs/r1", {"services": {"engine": {"resources": {"odd": 1}}}})


def test_pods_of_a_manifest_want_rays_token_and_reach_only_each_other(tmp_path):
    policy, body = yaml.safe_load_all(write_manifest(tmp_path / "service.yaml", "/runs/r1", {}).read_text())
    cluster = body["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert policy["kind"] == "NetworkPolicy"
    own_pods = policy["spec"]["podSelector"]["matchLabels"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert own_pods.items() <= group["template"]["metadata"]["labels"].items()
    inside, outside = policy["spec"]["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": own_pods}}]}
    assert [port["port"] for port in outside["ports"]] == [8000, 8265, 8080]


def test_features_is_one_replica():
    with pytest.raises(ValueError, match="features must be one replica"):
        ServicesConfig(features={"replicas": 2})
