"""Files of rows that tell which they are: `user` counts through all files, `items` are its first so many numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def table_of(first: int, rows: int) -> pa.Table:
    users = np.arange(first, first + rows)
    lengths = users % 5
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    items = np.concatenate([np.arange(length) + user for user, length in zip(users, lengths, strict=True)])
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(items.astype(np.int64)))
    return pa.table(
        {
            "user": users,
            "items": lists,
            "label": (users % 3 == 0).astype(np.int8),
            "name": [f"u{u}" for u in users],
        }
    )


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for number, first in enumerate(range(0, 900, 300)):
        pq.write_table(table_of(first, 300), folder / f"part-{number}.parquet", row_group_size=110)
    return folder
