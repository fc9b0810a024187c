"""Retries reads while a disk, a network or an object store does not respond, but never for corrupt data.

Corrupt data stay corrupt, so they are reported at once. Any other OSError of Arrow is retried four times within about two
seconds and then raised as UnreachableDataError, which no reader may skip as a bad row.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from nonet.errors import DataError

Read = TypeVar("Read")
WAITS_S = (0.1, 0.4, 1.5)
"""Seconds to wait before the second, third and fourth attempt."""
_NETWORK = re.compile(
    r"connection|reset by peer|timed? ?out|unreachable|network|temporar|refused|broken pipe|throttl|slow ?down|curl"
    r"|HTTP response code|AWS Error|service unavailable|too many requests|\b50[0234]\b",
    re.IGNORECASE,
)


class UnreachableDataError(DataError):
    """Data could not be read after several attempts: a file is gone, or the place where it lies does not answer."""


class CorruptDataError(DataError):
    """Data were read and are not what their format says. `on_bad_rows: skip` leaves out such rows alone."""


def read_with_retries(
    read: Callable[[], Read], label: str, is_corrupt: Callable[[OSError], bool] = lambda error: False
) -> Read:
    """Call `read` until it answers.

    Args:
        read: the call; it may run several times.
        label: opens the error's message.
        is_corrupt: whether an OSError says that the content is wrong, so that another attempt gives the same.

    Raises:
        CorruptDataError: Arrow cannot decode what it has read.
        UnreachableDataError: the last attempt failed as well, or the file is gone.
    """
    for wait_s in (*WAITS_S, None):
        try:
            return read()
        except FileNotFoundError:
            raise UnreachableDataError(f"{label}: the file is gone") from None
        except OSError as error:
            if not isinstance(error, (PermissionError, IsADirectoryError)):
                if is_corrupt(error):
                    raise CorruptDataError(f"{label}: cannot be read: {get_first_line(error)}") from None
                if wait_s is not None:
                    time.sleep(wait_s)
                    continue
            attempts = len(WAITS_S) + 1 if wait_s is None else 1
            raise UnreachableDataError(
                f"{label}: cannot be read after {attempts} attempts: {get_first_line(error)}. Nothing was skipped; start again "
                "when the storage responds"
            ) from None
        except pa.ArrowException as error:
            raise CorruptDataError(f"{label}: cannot be read: {get_first_line(error)}") from None
    raise AssertionError("the last attempt returns or raises")


def is_corruption(error: OSError, system: pafs.FileSystem, path: str) -> bool:
    """Return whether an OSError of a decoder is about the content of a file that can be read.

    Arrow raises OSError both for a connection that broke and for bytes that do not decompress. The operating system's own errors
    have an errno. For a file that is not local, both ends of it are read again: where that works, the content is wrong.
    """
    if error.errno is not None or _NETWORK.search(str(error)):
        return False
    if isinstance(system, pafs.LocalFileSystem):
        return True
    try:
        with system.open_input_file(path) as source:
            size = source.size()
            source.read_at(min(size, 1 << 16), 0)
            source.read_at(min(size, 1 << 16), max(0, size - (1 << 16)))
    except OSError:
        return False
    return True


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
