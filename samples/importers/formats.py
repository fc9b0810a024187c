"""The formats that `nonet import` reads."""

from __future__ import annotations

from collections.abc import Callable

from nonet.errors import ConfigError
from nonet.samples.importers.importers import Counts
from nonet.suggest import join_names, suggest_sentence


def get_importer(name: str) -> Callable[..., Counts]:
    """Return the importer of a format: movielens, csv or sequences. Raises ConfigError for another name."""
    from nonet.samples.importers.import_csv import import_csv
    from nonet.samples.importers.import_movielens import import_movielens
    from nonet.samples.importers.import_sequences import import_sequences

    formats = {"movielens": import_movielens, "csv": import_csv, "sequences": import_sequences}
    if name not in formats:
        raise ConfigError(
            f"no import format {name!r}; there are {join_names(formats)}.{suggest_sentence(name, formats)}"
        )
    return formats[name]
