"""The reference of rewards: its function, its class and its service run, and give the same scores."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nonet.rl.rewards.api import as_reward, find_reward, score_checked
from nonet.types import Jagged

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "rewards.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Everything that the Python blocks of the page define."""
    found: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), found)
    return found


@pytest.fixture
def address(names) -> Iterator[str]:
    """The address of a server that answers by the page's function."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(names["answer"](message)).encode())

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/fresh"
        server.shutdown()


def test_the_function_the_class_and_the_service_of_the_page_give_the_same_scores(
    names, address, make_rollouts
):
    ids = np.array([["SKU-1", "SKU-2"], ["SKU-3", "SKU-4"]])
    history = Jagged(np.array(["SKU-1", "SKU-4", "SKU-9"]), np.array([0, 1, 3]))
    r = make_rollouts(item_id=ids, history=history, columns={"price": np.array([[9.0, 29.0], [31.0, 5.0]])})
    by_function = as_reward(names["fresh"], {"ceiling": 30.0})
    by_class = as_reward(names["Fresh"], {"ceiling": 30.0})
    by_service = as_reward(find_reward(address), {"columns": ["price"]})
    for scored in (by_function, by_class, by_service):
        assert list(scored.columns) == ["price"]
        assert score_checked(scored, "fresh", r).tolist() == [[0, 1], [0, 0]]


def test_every_field_that_a_function_may_read_is_on_the_page():
    from nonet.rl.rewards.api import FIELDS

    row_text = PAGE.read_text(encoding="utf-8").partition("## In a scenario")[0]
    assert [
        field for field in FIELDS if f"`{field}`" not in row_text and f"`{field}[u]`" not in row_text
    ] == []
