"""Quantities with units, such as `30d`, `1.5TB` and `2s`; a bare number is in seconds or bytes.

Decimal units (KB, MB, GB, TB) are powers of 1000, binary units (KiB, MiB, GiB, TiB) are powers of 1024.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

# The sizes of the units, by their names in lower case.
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_BYTES = (
    {"b": 1}
    | {f"{p}b": 1000**i for i, p in enumerate("kmgtp", 1)}
    | {f"{p}ib": 1024**i for i, p in enumerate("kmgtp", 1)}
)
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_seconds(value: Any) -> float:
    """Parse a duration such as `30d`, `2s` or `1.5h`, or a number of seconds.

    Returns:
        The duration in seconds.

    Raises:
        ValueError: The value is not a duration; the message lists the units.
    """
    return _parse(value, _SECONDS, "s", "a duration such as 30d, 12h or 2s")


def parse_bytes(value: Any) -> int:
    """Parse a size such as `1.5TB` or `512MiB`, or a number of bytes.

    Returns:
        The size in bytes.

    Raises:
        ValueError: The value is not a size; the message lists the units.
    """
    return int(_parse(value, _BYTES, "b", "a size such as 1.5TB or 512MiB"))


def _parse(value: Any, units: Mapping[str, float], default_unit: str, quantity: str) -> float:
    """Parse a number with an optional unit.

    Args:
        value: The number, or text with a number and a unit in any case.
        units: The size of each unit in seconds or bytes, by its name in lower case.
        default_unit: The unit of a number without one.
        quantity: What the message expects, with examples.

    Returns:
        The value in seconds or bytes.

    Raises:
        ValueError: The value is not such a quantity.
    """
    match = (
        _QUANTITY.fullmatch(str(value))
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else None
    )
    unit = (match.group(2).lower() or default_unit) if match else ""
    if match is None or unit not in units:
        raise ValueError(f"expected {quantity} (units: {', '.join(units)}), got {value!r}")
    return float(match.group(1)) * units[unit]


# With the limit, sums of durations and times fit 64 bits.
Seconds = Annotated[float, BeforeValidator(parse_seconds, json_schema_input_type=float | str), Field(lt=1e12)]
Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
