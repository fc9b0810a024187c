"""A stand-in for the dashboard of a Ray cluster: the part of its HTTP interface that Nonet uses, with faults on request."""

from __future__ import annotations

import json
import platform
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import ray


class DashboardStandIn:
    """A server on a free port of this machine.

    Attributes:
        versions: Ray's and Python's version on the cluster.
        token: The token that requests must have; "" for none.
        jobs: The jobs, as Ray shows them, by submission id.
        packages: The uploaded packages by name.
        actors: The rows of actors.
        logs: The content of each log by file name, or by actor id and suffix.
        cuts: The number of bytes after which each of the next streams of a log is cut.
        refusals: The number of requests that are cut before an answer.
        listed_again: Whether a deleted job is listed once more, without its metadata, as by a Ray that still watches it.
    """

    def __init__(self):
        self.versions = {"rayVersion": ray.__version__, "pythonVersion": platform.python_version()}
        self.token = ""
        self.jobs: dict[str, dict[str, Any]] = {}
        self.packages: dict[str, bytes] = {}
        self.actors: list[dict[str, Any]] = []
        self.placement_groups: list[dict[str, Any]] = []
        self.logs: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.refusals = 0
        self.listed_again = False
        self.streams = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add_job(
        self, run: str, job: str | None = None, status: str = "RUNNING", **fields: Any
    ) -> dict[str, Any]:
        """Add a job of a run."""
        job = job or run
        self.jobs[job] = {
            "type": "SUBMISSION",
            "submission_id": job,
            "status": status,
            "entrypoint": f"nonet job {run}",
            "metadata": {"nonet_run": run, "nonet_scenario": "ring"},
            "start_time": 1_700_000_000_000 + len(self.jobs),
            "driver_node_id": "node",
            "driver_exit_code": None,
            **fields,
        }
        return self.jobs[job]

    def add_controller(self, run: str, actor_state: str = "ALIVE", **status: Any) -> None:
        """Add the controller of a run with the status that it wrote last."""
        actor = f"actor{len(self.actors)}"
        row = {"actor_id": actor, "name": f"{run}/controller", "state": actor_state, "job_id": "01000000"}
        self.actors.append(row | {"class_name": "SingleController", "ray_namespace": "nonet"})
        line = json.dumps({"run": run, "at": time.time(), "started": 1_700_000_000.0} | status)
        self.logs[f"{actor}.out"] = f"noise\n{line}\n".encode()
        self.logs[f"{actor}.err"] = b""

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        standin = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with suppress(ConnectionError, BrokenPipeError):
                    super().handle()

            def _cut(self) -> None:
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

            def _send(self, value: Any, code: int = 200) -> None:
                body = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(code)
                kind = "text/plain" if isinstance(value, bytes) else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if standin.refusals:
                    standin.refusals -= 1
                    self._cut()
                    return
                sent = self.headers.get("Authorization", "")
                if standin.token and sent != f"Bearer {standin.token}":
                    self._send(b"Unauthorized", 403 if sent else 401)
                    return
                url = urlsplit(self.path)
                parts, query = url.path.strip("/").split("/"), parse_qs(url.query)
                if url.path == "/api/version":
                    self._send({"version": "4", "ray_version": standin.versions["rayVersion"]})
                elif url.path == "/api/v0/cluster_metadata":
                    self._send({"result": True, "data": standin.versions})
                elif parts[:2] == ["api", "packages"]:
                    if self.command == "PUT":
                        standin.packages[parts[-1]] = body
                        self._send({})
                    else:
                        self._send({}, 200 if parts[-1] in standin.packages else 404)
                elif parts[:2] == ["api", "jobs"]:
                    self._answer_about_jobs(parts[2:], body)
                elif parts[:3] == ["api", "v0", "logs"]:
                    self._send_log(parts[3], query)
                elif parts[:2] == ["api", "v0"]:
                    rows = getattr(standin, parts[2])
                    for key, value in zip(
                        query.get("filter_keys", []), query.get("filter_values", []), strict=True
                    ):
                        rows = [row for row in rows if str(row.get(key)) == value]
                    self._send({"result": True, "data": {"result": {"result": rows}}})
                else:
                    self._send(b"no such page", 404)

            do_GET = do_PUT = do_POST = do_DELETE = _answer

            def _answer_about_jobs(self, parts: list[str], body: bytes) -> None:
                if not parts or not parts[0]:
                    if self.command == "POST":
                        sent = json.loads(body)
                        standin.add_job(sent["metadata"]["nonet_run"], sent["submission_id"], **sent)
                        standin.jobs[sent["submission_id"]]["sent"] = body.decode()
                        self._send({"submission_id": sent["submission_id"], "job_id": sent["submission_id"]})
                    else:
                        self._send(list(standin.jobs.values()))
                elif parts[0] not in standin.jobs:
                    self._send(b"no such job", 404)
                elif self.command == "DELETE":
                    del standin.jobs[parts[0]]
                    if standin.listed_again:
                        standin.add_job("", parts[0], "FAILED", metadata=None)
                        standin.listed_again = False
                    self._send({"deleted": True})
                elif parts[-1] == "stop":
                    standin.jobs[parts[0]]["status"] = "STOPPED"
                    self._send({"stopped": True})
                else:
                    self._send(standin.jobs[parts[0]])

            def _send_log(self, kind: str, query: dict[str, list[str]]) -> None:
                name = query.get("filename", [""])[0]
                if "actor_id" in query:
                    name = f"{query['actor_id'][0]}.{query['suffix'][0]}"
                if name not in standin.logs:
                    self._send(b"there is no such file", 500)
                    return
                if kind == "file":
                    lines, data = int(query["lines"][0]), standin.logs[name]
                    self._send(data if lines < 0 else b"".join(data.splitlines(keepends=True)[-lines:]))
                    return
                standin.streams += 1
                self.send_response(200)
                self.end_headers()
                cut = standin.cuts.pop(0) if standin.cuts else None
                sent = 0
                while True:
                    data = standin.logs[name][sent:cut]
                    self.wfile.write(data)
                    self.wfile.flush()
                    sent += len(data)
                    if cut is not None and sent >= cut:
                        self._cut()
                        return
                    time.sleep(0.01)

        return Handler
