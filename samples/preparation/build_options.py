"""Options of a preparation: where the tables are, and how sequences are built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

import pyarrow as pa

from nonet.samples.tables import MISSING, TableFormat, find_files, list_id_names
from nonet.samples.tokenised import VECTOR_FILES, attach_vectors


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
        drop_unknown_items: Whether events are left out whose item the items table lacks; otherwise they are an error.
        vectors: Path of the file of each column of vectors that the item table gets, by name.
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
    drop_unknown_items: bool = False
    vectors: Mapping[str, str] = field(default_factory=dict)

    @property
    def table_format(self) -> TableFormat:
        """The column names and texts for missing values with which both tables are read."""
        return TableFormat(dict(self.columns), self.missing)

    @property
    def leaves_out_unknown(self) -> bool:
        """Whether there is an items table, and events whose item it lacks are left out."""
        return self.drop_unknown_items and self.items is not None

    def attach_vectors(self, items: pa.Table) -> pa.Table:
        """Add the columns of `vectors` to the item table as it was read. Raises DataError if a file does not fit."""
        return attach_vectors(items, self.vectors, list_id_names(self.columns))

    def to_fingerprint(self) -> dict[str, Any]:
        """Return the values whose hash names the working folder, without `missing` and later options that have their default."""
        facts = asdict(self)
        del facts["missing"]
        for name in ("drop_unknown_items", "vectors"):
            if not facts[name]:
                del facts[name]
        missing = self.table_format.own_missing
        return facts if missing is None else {**facts, "missing": missing}

    def list_item_files(self) -> list[list[str]] | None:
        """Return the path and the identity of the content of each file of the item table and of vectors; None without one."""
        if self.items is None:
            return None
        files = find_files(self.items, "items").identify("items")
        for name, path in self.vectors.items():
            files += find_files(path, f"data.vectors.{name}", VECTOR_FILES).identify("items")
        return files
