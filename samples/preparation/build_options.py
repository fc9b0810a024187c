"""Options of a preparation: where the tables are, and how sequences are built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from nonet.samples.tables import MISSING, TableFormat


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How sequences are built: the arguments of `build_sequences` except `tie_seed`, with paths instead of tables.

    Attributes:
        interactions: Path of the interactions.
        items: Path of the item table; None without one.
        columns: Column of the tables by role.
        keep: Minimum numbers of events of users and items.
        split: Options of the split.
        targets: Target condition by stage.
        where: Condition on the interactions; None for all.
        repeats: Policy for repeated items; None derives it from the data.
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
        """Column names and missing texts that both tables are read with."""
        return TableFormat(dict(self.columns), self.missing)

    def to_fingerprint(self) -> dict[str, Any]:
        """Return the values that a working folder is named after. Default missing texts are omitted."""
        facts = asdict(self)
        del facts["missing"]
        missing = self.table_format.own_missing
        return facts if missing is None else {**facts, "missing": missing}
