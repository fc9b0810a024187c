"""Addresses of stores: a folder, lmdb:FOLDER, redis://HOST:PORT/NAME, hbase://HOST:PORT/TABLE; what opens and makes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from nonet.errors import ConfigError
from nonet.plugins import heavy
from nonet.samples.stores.base import Store
from nonet.suggest import did_you_mean, listed

_SCHEMES = {
    "packed": "nonet.samples.stores.packed:PackedStore",
    "lmdb": "nonet.samples.stores.lmdb:LMDBStore",
    "redis": "nonet.samples.stores.redis:RedisStore",
    "hbase": "nonet.samples.stores.hbase:HBaseStore",
}
_SHOWN = "a folder, lmdb:FOLDER, redis://HOST:PORT/NAME and hbase://HOST:PORT/TABLE"


def create_store(
    use: str, schema: pa.Schema, *, key: pa.DataType, versions: bool = False, **options: Any
) -> Store:
    """An empty store at an address. Raises ConfigError where there is one already, and for HBase, whose tables HBase makes."""
    scheme, rest = split_address(use)
    if scheme == "hbase":
        raise ConfigError(
            f"store {use}: tables of HBase are made in its shell: create 'TABLE', {{NAME => 'd', VERSIONS => 100}}"
        )
    cls = _class_of(scheme, use, options)
    return cls.create(rest, schema, key=key, versions=versions, **options)


def open_store(use: str, columns: Sequence[str] | Mapping[str, str] | None = None, **options: Any) -> Store:
    """The store at an address: a folder of packed segments, `lmdb:folder`, `redis://host:port/name`, `hbase://host:port/table`.

    columns: what an HBase table is asked for, name -> "family:qualifier type"; the others know their own. Raises ConfigError,
    NoStore where nothing is there.
    """
    scheme, rest = split_address(use)
    cls = _class_of(scheme, use, options)
    if scheme == "hbase":
        options = {"columns": columns, **options}
    return cls(rest, **options)


def _class_of(scheme: str, use: str, options: Mapping[str, Any]) -> Any:
    """The class behind a scheme. Raises ConfigError for an option that it has not."""
    cls = heavy(_SCHEMES[scheme])
    parameters = inspect.signature(cls).parameters.values()
    known = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return cls  # it names its own
    for name in options:
        if name not in known:
            there = f"there are {listed(known)}" if known else "it has none"
            raise ConfigError(f"store {use}: no option {name!r}; {there}.{did_you_mean(name, known)}")
    return cls


def split_address(use: str) -> tuple[str, str]:
    """("packed" | "lmdb" | "redis" | "hbase", the folder or host:port/name). Raises ConfigError; passwords are refused."""
    scheme, colon, rest = use.partition(":")
    if not colon or "/" in scheme:
        return "packed", use
    if scheme not in _SCHEMES:
        raise ConfigError(f"store {use!r}: there are {_SHOWN}.{did_you_mean(scheme, _SCHEMES)}")
    if "@" in urlsplit(use).netloc:
        place = use.rpartition("@")[2]
        raise ConfigError(
            f"store {scheme}://{place}: a user or password stands in the address; take it out and set "
            f"NONET_{scheme.upper()}_PASSWORD in the environment"
        )
    return scheme, rest.removeprefix("//")


def check_address(use: str) -> None:
    """Raises ConfigError for an address that `open_store` does not know, or that holds a password."""
    split_address(use)
