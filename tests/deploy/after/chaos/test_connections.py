"""The proxy that disturbs the connections to object storage."""

from __future__ import annotations

import os
import socket
import time
from types import SimpleNamespace

import pytest

from nonet.deploy.after.chaos import connections
from nonet.deploy.after.chaos.connections import ENDPOINT, check_endpoint, place_proxy
from nonet.errors import ConfigError
from nonet.storage import open_storage
from tests.s3 import BUCKET, serve_s3


def test_requests_through_the_proxy_are_delayed_repeated_after_cuts_and_go_to_the_storage_again_after_it():
    with serve_s3() as variables:
        with place_proxy("127.0.0.1") as proxy:
            assert os.environ[ENDPOINT] == f"http://127.0.0.1:{proxy.port}" != variables[ENDPOINT]
            storage = open_storage(f"{BUCKET}/run")
            storage.put("a", b"1")
            proxy.delay(1.0)
            began = time.monotonic()
            storage.put("b", b"2")
            assert time.monotonic() - began >= 0.3
            proxy.cut(1.0)
            stored = storage.get("b")
            assert stored is not None
            assert stored.content == b"2"
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=30):
                pass
        assert os.environ[ENDPOINT] == variables[ENDPOINT]
        assert {"a", "b"} == set(open_storage(f"{BUCKET}/run").list_objects(""))
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=30)


def test_a_fault_of_connections_lasts_as_long_as_the_longest_that_overlaps_it(
    monkeypatch: pytest.MonkeyPatch,
):
    now = [100.0]
    proxy = connections.StorageProxy(("127.0.0.1", 9), "127.0.0.1")
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for disturb, is_disturbed in (
        (proxy.cut, lambda: proxy.is_cut),
        (proxy.delay, lambda: proxy.is_slow),
    ):
        start = now[0]
        disturb(1.0)
        disturb(3.0)
        disturb(0.5)
        now[0] = start + 2.9
        assert is_disturbed()
        now[0] = start + 3.0
        assert not is_disturbed()
    proxy.close()
    assert proxy.is_cut


@pytest.mark.parametrize("url", [None, "https://s3.example.com"])
def test_a_storage_before_which_no_proxy_can_be_placed_is_refused(
    monkeypatch: pytest.MonkeyPatch, url: str | None
):
    monkeypatch.delenv(ENDPOINT, raising=False)
    if url:
        monkeypatch.setenv(ENDPOINT, url)
    with pytest.raises(ConfigError, match="--kill storage places a proxy before the storage"):
        check_endpoint()
