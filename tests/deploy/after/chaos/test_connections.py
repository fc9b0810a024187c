"""The proxy that disturbs the connections to object storage."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

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
            slow = threading.Thread(target=proxy.delay, args=(1.0,))
            slow.start()
            began = time.monotonic()
            storage.put("b", b"2")
            assert time.monotonic() - began >= 0.3
            slow.join()
            cut = threading.Thread(target=proxy.cut, args=(1.0,))
            cut.start()
            stored = storage.get("b")
            assert stored is not None
            assert stored.content == b"2"
            cut.join()
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=30):
                pass
        assert os.environ[ENDPOINT] == variables[ENDPOINT]
        assert {"a", "b"} == set(open_storage(f"{BUCKET}/run").list_objects(""))
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", proxy.port), timeout=30)


@pytest.mark.parametrize("url", [None, "https://s3.example.com"])
def test_a_storage_before_which_no_proxy_can_be_placed_is_refused(
    monkeypatch: pytest.MonkeyPatch, url: str | None
):
    monkeypatch.delenv(ENDPOINT, raising=False)
    if url:
        monkeypatch.setenv(ENDPOINT, url)
    with pytest.raises(ConfigError, match="--kill storage places a proxy before the storage"):
        check_endpoint()
