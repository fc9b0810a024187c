"""`nonet import`: other formats as the two Parquet tables."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from nonet.errors import ConfigError
from nonet.samples.importers import importer


def import_tables(
    form: str, source: Path, target: Path, columns: list[str], items: Path | None
) -> dict[str, Any]:
    """Import and count. Raises ConfigError and DataError."""
    given: dict[str, Any] = {}
    for text in columns:
        role, equals, name = text.partition("=")
        if not equals:
            raise ConfigError(f"--column wants ROLE=NAME such as user=uid, got {text!r}")
        given[role] = name
    extra = {"columns": given or None, "items": items} if form == "csv" else {}
    if form != "csv" and (given or items):
        raise ConfigError(f"--column and --items belong to `import csv`, not to `import {form}`")
    counts = importer(form)(source, target, **extra)
    return asdict(counts) if is_dataclass(counts) and not isinstance(counts, type) else dict(counts)
