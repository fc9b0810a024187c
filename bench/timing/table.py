"""What a bench found, on the terminal: a JSON line a row, then the ratios."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def show(found: Mapping[str, Any], digits: int = 3) -> None:
    """Print the rows and the ratios, these rounded."""
    for row in found["rows"]:
        print(json.dumps(row))
    print(json.dumps({name: round(value, digits) for name, value in found["ratio"].items()}, indent=1))
