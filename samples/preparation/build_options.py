"""Options of a preparation: where the tables are, and how sequences are built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from nonet.samples.tables import MISSING, TableFormat, find_parquet


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options for building sequences: the arguments of `build_sequences` except `tie_seed`, with paths instead of tables.

    Attributes:
        interactions: Path of the interactions.
        items: Path of the item table; None without one.
        columns: Name of a column in the tables by its role, for example `user_id`.
        keep: Minimum numbers of events of users and items.
        split: Options of the split.
        targets: Condition of the target by stage.
        where: Condition on the interactions; None for all.
        repeats: "allow" or "mask" for repeated items; None to decide by the data.
        missing: Texts that stand for a missing value.
    """

    interactions: str
    _: KW_ONLY
    items: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    keep: Mapping[str, int] = field(default_factory=dict)
    split: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None
    repeats: str | None = None
    missing: tuple[str, ...] = MISSING

    @property
    def table_format(self) -> TableFormat:
        """The column names and texts for missing values with which both tables are read."""
        return TableFormat(dict(self.columns), self.missing)

    def to_fingerprint(self) -> dict[str, Any]:
        """Return the values whose hash names the working folder. `missing` is omitted if it is the default."""
        facts = asdict(self)
        del facts["missing"]
        missing = self.table_format.own_missing
        return facts if missing is None else {**facts, "missing": missing}

    def list_item_files(self) -> list[list[Any]] | None:
        """Return the path, size and modification time of each file of the item table; None without one."""
        if self.items is None:
            return None
        system, files = find_parquet(self.items, "items")
        return [[info.path, info.size, info.mtime_ns] for info in system.get_file_info(files)]
