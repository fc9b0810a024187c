"""HTTP: a server of scores, and the reward that asks it.

    python examples/rewards/server.py 8090

rewards: {even: {use: "http://127.0.0.1:8090/even", timeout_s: 5}}
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Even(BaseHTTPRequestHandler):
    """1 for items with an even id. `message` has uid, user_id, item_id, valid, history, target, step and columns."""

    def do_POST(self):
        """Answer a request for scores."""
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = [[float(item % 2 == 0) for item in items] for items in message["item_id"]]
        body = json.dumps({"scores": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        """Says nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Even).serve_forever()
