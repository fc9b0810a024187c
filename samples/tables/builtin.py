"""Data sets that come with the package, named `builtin:<set>/<file>`, each with its licence beside it."""

from __future__ import annotations

import os
from pathlib import Path

from nonet.errors import DataError
from nonet.suggest import did_you_mean, listed

_DATA = Path(__file__).parents[1] / "data"
_PREFIX = "builtin:"
_NOTICES = {
    "movielens-small": (
        "MovieLens latest-small (October 2016) by GroupLens, University of Minnesota: for research, to be "
        "redistributed "
        "under the same conditions, no commercial use without permission. Terms and citation: {terms}"
    )
}


def builtin_path(name: str) -> Path:
    """The file behind `builtin:movielens-small/interactions.parquet`; an unknown name lists what there is."""
    known = [f"{_PREFIX}{file.relative_to(_DATA).as_posix()}" for file in sorted(_DATA.glob("*/*.parquet"))]
    if name not in known:
        raise DataError(
            f"{name}: no such built-in table; there are {listed(known)}.{did_you_mean(name, known)}"
        )
    return _DATA / name.removeprefix(_PREFIX)


def notice(path: str | os.PathLike[str]) -> str | None:
    """One line that names the licence of a built-in set and where its terms lie; None for the user's own
    data."""
    text = os.fspath(path)
    if not text.startswith(_PREFIX):
        return None
    folder = builtin_path(text).parent
    return _NOTICES[folder.name].format(terms=folder / "README.txt")
