"""Old names of public functions, which stay callable for one version so that plug-ins written for it still run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable)


def keep_old_name(old: str, function: _Function) -> _Function:
    """Return a function that calls `function`, and logs the new name as a warning at the first call.

    Args:
        old: The name that plug-ins may still use, as in `nonet.rl.weighted_sum`.
        function: The function under its new name.
    """

    @wraps(function)
    def call(*args, **kwargs):  # type: ignore[no-untyped-def]
        _log_new_name(old, function.__qualname__)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@cache
def _log_new_name(old: str, new: str) -> None:
    """Log a warning that names the new name, once per process and name."""
    logging.getLogger("nonet").warning("%s is now called %s; the old name will be removed in 0.3", old, new)
