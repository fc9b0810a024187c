"""Retries reads while a disk, a network or an object store does not respond, but never for corrupt data.

Corrupt data stay corrupt, so they are reported at once. After any other OSError of Arrow the read is attempted again, up to four
times in total within about two seconds; then UnreachableDataError is raised, which no reader may skip as a bad row.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from nonet.contents import identify_content
from nonet.errors import DataError

Result = TypeVar("Result")
PAUSES_S = (0.1, 0.4, 1.5)
"""Seconds to wait before the second, third and fourth attempt."""
# Texts of errors that say that the connection is broken, and not the content.
_NETWORK_ERROR = re.compile(
    r"connection|reset by peer|timed? ?out|unreachable|network|temporar|refused|broken pipe|throttl|slow ?down|curl"
    r"|HTTP response code|AWS Error|service unavailable|too many requests|\b50[0234]\b",
    re.IGNORECASE,
)


class UnreachableDataError(DataError):
    """Raised when data could not be read after several attempts: a file is gone, or its storage does not respond."""


class CorruptDataError(DataError):
    """Raised when data were read but cannot be decoded. `on_bad_rows: skip` skips rows only for this error."""


def read_with_retries(
    read: Callable[[], Result], label: str, is_corrupt: Callable[[OSError], bool] = lambda error: False
) -> Result:
    """Return the result of `read`, which is called again after errors of the storage.

    Args:
        read: The function; it may be called several times.
        label: Prefix of error messages.
        is_corrupt: Function that returns whether an OSError is about invalid content, so that another attempt is useless.

    Raises:
        CorruptDataError: If Arrow cannot decode what was read.
        UnreachableDataError: If the last attempt failed as well, the file is gone, or it must not be read.
    """
    for wait_s in (*PAUSES_S, None):
        try:
            return read()
        except FileNotFoundError:
            raise UnreachableDataError(f"{label}: the file is gone") from None
        except OSError as error:
            if not isinstance(error, (PermissionError, IsADirectoryError)):  # These two do not go away.
                if is_corrupt(error):
                    raise CorruptDataError(f"{label}: cannot be read: {get_first_line(error)}") from None
                if wait_s is not None:
                    time.sleep(wait_s)
                    continue
            attempts = len(PAUSES_S) + 1 if wait_s is None else 1
            raise UnreachableDataError(
                f"{label}: cannot be read after {attempts} attempts: {get_first_line(error)}. Nothing was skipped; start again "
                "when the storage responds"
            ) from None
        except pa.ArrowException as error:
            raise CorruptDataError(f"{label}: cannot be read: {get_first_line(error)}") from None
    raise AssertionError("the last attempt returns or raises")


def identify_file(system: pafs.FileSystem, path: str, label: str) -> str:
    """Return the identity of the content of a file (`nonet.contents`), as `read_with_retries` reads it."""
    return read_with_retries(lambda: identify_content(system, path), label)


def is_corruption(error: OSError, system: pafs.FileSystem, path: str) -> bool:
    """Return whether an OSError of Arrow is about invalid content of a file, and not about reading it.

    Arrow raises OSError both for a connection that broke and for bytes that do not decompress. Only errors of the operating
    system have an errno. For a remote file, its beginning and end are read again: if that works, the content is invalid.

    Args:
        error: The error.
        system: Filesystem of the file.
        path: Path of the file.
    """
    if error.errno is not None or _NETWORK_ERROR.search(str(error)):
        return False
    if isinstance(system, pafs.LocalFileSystem):
        return True
    try:
        with system.open_input_file(path) as source:
            size = source.size()
            length = min(size, 1 << 16)
            source.read_at(length, 0)
            source.read_at(length, size - length)
    except OSError:
        return False
    return True


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
