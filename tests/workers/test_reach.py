"""What keeps Ray from starting is said in one line, within seconds, before anything is begun."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from nonet.errors import ConfigError
from nonet.workers import reach
from nonet.workers.reach import check_port, check_ray_environment


@pytest.fixture(autouse=True)
def no_ray_yet(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def foreign():
    """Return the port of a server that is no Ray cluster."""

    class Silent(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            """Say nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:{foreign}"])
def test_an_address_where_no_cluster_answers_is_named(monkeypatch, foreign, address):
    address = address.format(foreign=foreign)
    monkeypatch.setattr(reach, "_ANSWER_S", 0.5)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        ConfigError, match=f"RAY_ADDRESS is {address}, where no Ray cluster answers.*unset RAY_ADDRESS"
    ):
        check_ray_environment()


def test_a_machine_that_is_no_node_of_the_cluster_is_told_to_submit(monkeypatch, tmp_path):
    nodes = {"a": SimpleNamespace(raylet_socket_name=str(tmp_path / "raylet"))}
    client = SimpleNamespace(get_all_node_info=lambda timeout: nodes)
    monkeypatch.setitem(sys.modules, "ray._raylet", SimpleNamespace(GcsClient=lambda address: client))
    with pytest.raises(
        ConfigError, match=r"this machine is no node of that cluster; .* nonet submit SCENARIO"
    ):
        reach._check_membership("10.0.0.1:6379", "RAY_ADDRESS")
    (tmp_path / "raylet").touch()
    reach._check_membership("10.0.0.1:6379", "RAY_ADDRESS")


@pytest.mark.parametrize("address", ["nonsense", "host", "host:port", "http://host:80/x"])
def test_a_misspelt_address_is_told_what_it_must_be(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match="it must be host:port, auto or local"):
        check_ray_environment()


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_temporary_folder_that_is_too_long_or_missing_is_named_with_its_variable(
    monkeypatch, tmp_path, variable
):
    monkeypatch.setenv(variable, "/tmp/" + "x" * 60)
    with pytest.raises(ConfigError, match=rf"{variable} is /tmp/x+, 65 bytes long; .*107.*set RAY_TMPDIR"):
        check_ray_environment()
    monkeypatch.setenv(variable, "/nowhere")
    with pytest.raises(ConfigError, match=f"{variable} is /nowhere, which is no folder"):
        check_ray_environment()


def test_a_temporary_folder_without_room_is_named(monkeypatch):
    monkeypatch.setattr(reach.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 << 20))
    with pytest.raises(ConfigError, match="the temporary folder is /tmp, with 3 MiB left"):
        check_ray_environment()


@pytest.mark.slow
def test_a_run_that_cannot_reach_its_cluster_leaves_no_folder_and_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    done = subprocess.run(
        [sys.executable, "-c", "from nonet.deploy.cli import main; main()", "run", "quickstart"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "RAY_ADDRESS is 127.0.0.1:1" in done.stderr
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_in_use_is_one_line_that_says_what_to_write(foreign, host):
    with pytest.raises(
        ConfigError, match=rf"^{host}:{foreign} cannot be listened on .*; choose another port with --port$"
    ):
        check_port(host, foreign)


def test_a_host_of_no_machine_is_named_and_a_free_port_is_fine():
    with pytest.raises(ConfigError, match=r"^no.such.host:80 cannot be listened on .* host with --host$"):
        check_port("no.such.host", 80)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check_port("127.0.0.1", port)
