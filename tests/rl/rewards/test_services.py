"""A reward service is asked directly or through the proxy of the environment, and its token goes nowhere else."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from nonet.errors import DataError
from nonet.rl.rewards import remote
from nonet.rl.rewards.api import as_reward, find_reward, score_checked
from nonet.rl.rewards.checks import Unreachable
from nonet.types import Jagged


@contextmanager
def serve(code=200, **headers):
    """Yield the address of a server, and a list of the (path, token) of each request; it answers zeros with this code."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers["Authorization"]))
            body = json.dumps({"scores": np.zeros_like(message["valid"], dtype=float).tolist()}).encode()
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            requests.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("SECRET", "abc")


@pytest.fixture
def rollouts(make_rollouts):
    return make_rollouts(item_id=np.array([[1, 2]]), history=Jagged(np.array([1]), np.array([0, 1])))


def ask(url, rollouts):
    reward = as_reward(find_reward(url), {"token": "SECRET"})
    reward.timeout_s = 5.0
    return score_checked(reward, "r", rollouts)


def test_a_service_of_this_machine_is_asked_directly_whatever_the_proxy(rollouts, monkeypatch):
    with serve() as (url, requests), serve(503) as (proxy, proxied):
        monkeypatch.setenv("http_proxy", proxy)
        for host in ("127.0.0.1", "localhost"):
            assert not ask(f"{url.replace('127.0.0.1', host)}/score", rollouts).any()
            find_reward(f"{url.replace('127.0.0.1', host)}/score").check_reachable("r", 5.0)
        assert (requests, proxied) == ([("/score", "Bearer abc")] * 2, [])


def test_another_host_is_asked_through_the_proxy_which_is_named_without_its_password(rollouts, monkeypatch):
    with serve(503) as (proxy, proxied):
        address = proxy.removeprefix("http://")
        monkeypatch.setenv("http_proxy", f"http://me:secret@{address}")
        with pytest.raises(
            Unreachable, match=f"answered 503: .*through the proxy {address} of http_proxy"
        ) as error:
            ask("http://scores.example:8080/score", rollouts)
        assert "no_proxy=scores.example" in str(error.value)
        assert "secret" not in str(error.value)
        assert [path for path, _ in proxied] == ["http://scores.example:8080/score"]
        find_reward("http://scores.example:8080/score").check_reachable("r", 5.0)  # the proxy can be reached
    with pytest.raises(Unreachable, match=f"cannot be reached: .*through the proxy {address}"):
        find_reward("http://scores.example:8080/score").check_reachable("r", 5.0)
    monkeypatch.setenv("no_proxy", "scores.example")
    assert remote._find_proxy("http://scores.example:8080/score") is None
    assert remote._find_proxy("https://other.example/score") is None


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_by_its_target_which_gets_no_token(rollouts, code):
    with serve() as (other, requests), serve(code, Location=f"{other}/login?state=hidden") as (url, asked):
        with pytest.raises(DataError, match=f"answered {code}: it redirects to '{other}/login', ") as error:
            ask(f"{url}/score", rollouts)
        assert "hidden" not in str(error.value)
        assert (requests, len(asked)) == ([], 1)


def test_a_relative_redirect_is_refused_by_its_whole_address(rollouts):
    with (
        serve(307, Location="/score/") as (url, _),
        pytest.raises(DataError, match=f"answered 307: it redirects to '{url}/score/'"),
    ):
        ask(f"{url}/score", rollouts)
