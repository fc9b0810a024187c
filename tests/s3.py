"""A server with the S3 API in this process, for tests of object storage."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "s3://feed-runs"


@contextmanager
def serve_s3() -> Iterator[dict[str, str]]:
    """Serve a bucket `feed-runs` on a free port of this machine; servers of one process have the same content.

    At the end, this process forgets the runs that it has mounted meanwhile, which later tests would mount in their workers.

    Yields:
        The environment variables with which processes reach it; they are also set in this process.
    """
    from moto.server import ThreadedMotoServer

    from nonet.storage import mounts

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret-that-no-file-may-have",
        "AWS_REGION": "us-east-1",
    }
    mounted = dict(mounts._copies)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        request = urllib.request.Request(f"{variables['AWS_ENDPOINT_URL']}/feed-runs", method="PUT")
        urllib.request.urlopen(request).close()
        yield variables
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        server.stop()
        mounts._copies.clear()
        mounts._copies.update(mounted)
