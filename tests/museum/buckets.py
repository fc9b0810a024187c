"""Copy the bucket of `tests/s3.py` into a folder, with a file for each object named by its key, and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3

BUCKET = "feed-runs"


def save_bucket(endpoint: str, folder: Path) -> None:
    """Write the objects of the bucket into a folder."""
    client = boto3.client("s3", endpoint_url=endpoint)
    for key in list_keys(client):
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


def fill_bucket(endpoint: str, folder: Path) -> None:
    """Put each file of a folder into the bucket as an object, and delete all other objects."""
    client = boto3.client("s3", endpoint_url=endpoint)
    for key in list(list_keys(client)):
        client.delete_object(Bucket=BUCKET, Key=key)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=BUCKET, Key=path.relative_to(folder).as_posix(), Body=path.read_bytes())


def list_keys(client: Any) -> Iterator[str]:
    """Yield the key of each object of the bucket."""
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for stored in page.get("Contents", []):
            yield stored["Key"]
