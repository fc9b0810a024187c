"""A server behind a socket: slow callers, bodies without an end, torn versions, versions side by side, the page in a browser."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import threading
import time

import pytest
import uvicorn

from nonet.deploy.serving.start import serve_run
from nonet.errors import ConfigError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def port(app):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=chosen, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield chosen
    server.should_exit = True
    thread.join()


def call(port, path="/recommend", verb="POST", **body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(verb, path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text.startswith(b"{") else text.decode()


def head(port, length):
    """Open a connection that has begun a request with a body of so many bytes."""
    line = socket.create_connection(("127.0.0.1", port), timeout=30)
    line.sendall(b"POST /recommend HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    line.sendall(
        f"Content-Length: {length}\r\n\r\n".encode() if length else b"Transfer-Encoding: chunked\r\n\r\n"
    )
    return line


def test_callers_that_send_or_read_slowly_hold_up_nobody(port):
    half = [head(port, 50) for _ in range(20)]
    for line in half:
        line.sendall(b'{"user"')
    deaf = head(port, len(b'{"user": 101, "k": 30, "explain": true}'))
    deaf.sendall(b'{"user": 101, "k": 30, "explain": true}')  # and never reads
    for user in (101, 102, 103):
        assert call(port, user=user, k=5)[0] == 200
    for line in (*half, deaf):
        line.close()
    assert call(port, user=101, k=5)[0] == 200


def test_bodies_that_are_too_long_or_without_a_length_are_refused_before_they_are_read(port):
    for length, status, kind in ((10 << 20, 413, "too_large"), (0, 411, "no_length")):
        line = head(port, length)
        answer = line.recv(1 << 16).decode()
        assert answer.startswith(f"HTTP/1.1 {status}")
        assert kind in answer
        line.close()


def test_two_versions_side_by_side_have_their_own_metrics(port, served, app):
    served.commit(1)
    until(lambda: call(port, "/versions", "GET")[1]["default"] == 2)
    served.open().registry.promote(1)
    served.open().registry.promote(2, 0.5)
    until(lambda: call(port, "/versions", "GET")[1]["answering"] == [1, 2])
    versions = {user: call(port, user=user, k=3)[1]["version"] for user in range(100, 120)}
    assert set(versions.values()) == {1, 2}
    assert all(call(port, user=user, k=3)[1]["version"] == version for user, version in versions.items())
    text = call(port, "/metrics", "GET")[1]
    for version in (1, 2):
        assert f'nonet_request_seconds_count{{verb="recommend",version="{version}"}}' in text
        assert f'nonet_batches{{version="{version}"}}' in text


def test_a_version_whose_files_are_torn_is_named_and_never_served(port, served):
    registry = served.open().registry
    serving = registry.serving
    number = served.open().publish_checkpoint(6).number  # the commit of version 1: the same files
    assert number == 1
    served.commit(1)
    until(lambda: call(port, "/versions", "GET")[1]["default"] == 3)
    registry.promote(serving.default)
    until(lambda: call(port, "/versions", "GET")[1]["default"] == serving.default)
    torn = served.open().build_contents(*served.open().find_newest_commit())
    torn.source["commit"] = "torn"
    fourth = registry.publish(torn, base=3, serve=False)
    manifest = registry.root / "versions" / f"{fourth.number:06d}.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    text = json.dumps({"default": fourth.number, "shares": {}, "refused": [], "withdrawn": [], "turn": 99})
    (registry.root / "serving.json").write_text(text)
    until(lambda: call(port, "/versions", "GET")[1]["problems"])
    assert "not a complete version" in next(iter(call(port, "/versions", "GET")[1]["problems"].values()))
    status, answer = call(port, user=101, k=5)
    assert (status, answer["version"]) == (200, serving.default)
    manifest.unlink()
    registry.promote(serving.default)


def test_a_port_in_use_and_a_run_without_a_commit_are_one_line(port, served, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be listened on .* choose another port with --port"):
        serve_run(str(served.folder.path), port=port)
    empty = tmp_path / "run"
    shutil.copytree(served.folder.path, empty, ignore=shutil.ignore_patterns("checkpoints", "serving"))
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        serve_run(str(empty), port=port)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_the_page_shows_in_a_browser_what_was_read_and_why(port, tmp_path):
    url = f"http://127.0.0.1:{port}/?user=103"
    asked = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    page = subprocess.run(
        [*asked, "--virtual-time-budget=8000", "--dump-dom", url], capture_output=True, text=True, timeout=90
    ).stdout
    assert "answered by version" in page
    rows = page[page.index('<tbody id="list">') : page.index("</tbody>")]
    assert rows.count("<tr>") == 10
    assert "seen</button>" in rows
    assert 'class="bar vote"' in rows
    assert "item " in page[page.index('<ol id="read">') : page.index("</ol>")]


def until(true):
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
