"""Packed Arrow: the rows of Parquet files as Arrow IPC files, uncompressed, to be mapped and read without decoding."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from nonet.atomic import make_folder, sync
from nonet.errors import ConfigError, DataError
from nonet.samples.tables.files import find_parquet
from nonet.samples.tables.paths import parquet_footer, read_groups

GROUP_ROWS = b"nonet.rows"
"""In the schema's metadata: the rows of each batch, so that a file far away is not read to count them."""


def pack_files(
    source: str, folder: str | os.PathLike[str], done: Callable[[int, int], None] | None = None
) -> list[Path]:
    """Every Parquet file behind `source` as packed Arrow in `folder`, its row groups as they are; each whole or not at all.

    done: told (files written, files in all). Raises DataError, ConfigError where two files have one name.
    """
    system, files = find_parquet(source, "samples")
    targets = [Path(folder) / f"{Path(file).stem}.arrow" for file in files]
    if len(set(targets)) < len(targets):
        raise ConfigError(
            f"{source}: files of several folders have the same name; pack one folder after the other"
        )
    make_folder(Path(folder))
    for number, (file, target) in enumerate(zip(files, targets, strict=True)):
        footer = parquet_footer(system, file, "samples")
        rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        schema = footer.schema.to_arrow_schema().remove_metadata()
        names, marked = schema.names, schema.with_metadata({GROUP_ROWS: ",".join(map(str, rows)).encode()})
        draft = target.with_name(f".{target.name}")
        with pa.OSFile(str(draft), "wb") as out, pa.ipc.new_file(out, marked) as writer:
            for group, count in enumerate(rows):
                table = read_groups(system, file, [group], "samples", names).combine_chunks()
                batches = table.replace_schema_metadata().to_batches()
                if len(batches) != 1 and count:
                    raise DataError(
                        f"{file}, row group {group}: too large for one batch; write smaller row groups"
                    )
                writer.write_batch(
                    pa.record_batch(batches[0].columns, schema=marked) if count else _none(marked)
                )
        sync(draft)
        os.replace(draft, target)
        if done is not None:
            done(number + 1, len(files))
    return targets


def _none(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
