"""Which files and addresses of a scenario are opened before a run, and what the checks of them found."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nonet.plugins import parse_file
from nonet.workers.roles.artifacts import BuiltData, DataSetup


@dataclass
class FileChecks:
    """Which files and addresses of a scenario are opened, and what the checks of them found.

    Attributes:
        opens_addresses: Whether addresses of other machines are opened, such as URIs of tables and networked stores.
        allows_absent: Whether an absolute path that does not exist here may exist where the run will be.
        max_table_bytes: The size above which only the schema and one row group of a table are read; None for no limit.
        warnings: Warnings about joined stores and about the data, one sentence each.
        unchecked: What was not opened, each as "key: value".
    """

    opens_addresses: bool = True
    allows_absent: bool = False
    max_table_bytes: int | None = None
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    _newest_tables: tuple[DataSetup, BuiltData] | None = None

    def build_sequences(self, data: DataSetup) -> BuiltData:
        """Return the sequences and items of data, which are read once for successive scenarios with the same data."""
        if self._newest_tables is None or self._newest_tables[0] != data:
            self._newest_tables = (data, data.build_with_facts())
        return self._newest_tables[1]

    def accept_address(self, key: str, address: str) -> bool:
        """Accept an address or a path that is opened from here, and add any other to `unchecked`.

        Args:
            key: The key of the scenario that has the address.
            address: A URI, a path, a pattern of paths, `lmdb:FOLDER` or `file.py:NAME`.

        Returns:
            Whether the address was accepted.
        """
        path = address.removeprefix("lmdb:")
        path = parse_file(path) or path
        is_absent = self.allows_absent and Path(path).is_absolute() and not glob.glob(path)
        if self.opens_addresses or not ("://" in address or is_absent):
            return True
        self.unchecked.append(f"{key}: {address}")
        return False

    def accept_addresses(self, key: str, options: Mapping[str, Any]) -> bool:
        """Call `accept_address` for every text among options, and return whether all were accepted."""
        texts = {name: value for name, value in options.items() if isinstance(value, str)}
        are_opened = [self.accept_address(f"{key}.{name}", value) for name, value in texts.items()]
        return all(are_opened)
