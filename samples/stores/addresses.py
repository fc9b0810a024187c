"""Addresses of stores: a folder, lmdb:FOLDER, redis://HOST:PORT/NAME, hbase://HOST:PORT/TABLE; what opens and makes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from nonet.contracts import check_class, find_entry_point
from nonet.errors import ConfigError
from nonet.plugins import load_heavy
from nonet.samples.stores.base import Store
from nonet.suggest import join_names, suggest_sentence

_GROUP = "nonet.stores"  # entry points of other packages: a scheme of addresses and a subclass of Store
_PAGE = "docs/how-to/stores.md"
_SHIPPED = {
    "packed": "nonet.samples.stores.packed:PackedStore",
    "lmdb": "nonet.samples.stores.lmdb:LMDBStore",
    "redis": "nonet.samples.stores.redis:RedisStore",
    "hbase": "nonet.samples.stores.hbase:HBaseStore",
}
_SHOWN = "a folder, lmdb:FOLDER, redis://HOST:PORT/NAME and hbase://HOST:PORT/TABLE"


def create_store(
    use: str, schema: pa.Schema, *, key: pa.DataType, versions: bool = False, **options: Any
) -> Store:
    """Create an empty store at an address.

    Raises:
        ConfigError: A store is already there, or a database makes stores of this kind itself.
    """
    scheme, rest = split_address(use)
    cls = find_store_class(scheme)
    if cls.made_elsewhere:
        raise ConfigError(f"store {use}: {cls.made_elsewhere}: {cls.creation_command}")
    _check_options(cls, use, options)
    return cls.create(rest, schema, key=key, versions=versions, **options)


def open_store(use: str, columns: Sequence[str] | Mapping[str, str] | None = None, **options: Any) -> Store:
    """Open the store at an address: a folder of packed segments, `lmdb:folder`, `redis://host:port/name`, `hbase://host:port/table`.

    Args:
        use: The address.
        columns: Columns of an HBase table, name -> "family:qualifier type"; other stores know their columns.
        **options: Options of the store.

    Raises:
        ConfigError: If the address or an option is not valid.
        NoStore: If there is no store at the address.
    """
    scheme, rest = split_address(use)
    cls = find_store_class(scheme)
    _check_options(cls, use, options)
    if cls.takes_columns:
        options = {"columns": columns, **options}
    return cls(rest, **options)


def find_store_class(scheme: str) -> Any:
    """Return the class of stores behind a scheme of addresses, a shipped one or one of an installed package.

    Raises:
        ConfigError: The scheme is taken twice, or the class does not meet the contract of a store.
    """
    title = f"store {scheme!r}"
    point = find_entry_point(scheme, _GROUP, title, _SHIPPED)
    if point is None:
        return load_heavy(_SHIPPED[scheme])
    cls = load_heavy(point.value)
    check_class(cls, Store, title, _PAGE)
    if not cls.made_elsewhere and not callable(getattr(cls, "create", None)):
        raise ConfigError(f"{title} ({point.value}): class {cls.__name__} has no create; see {_PAGE}")
    return cls


def _check_options(cls: Any, use: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that the class of a store does not have."""
    parameters = inspect.signature(cls).parameters.values()
    known = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return  # the class checks its own options
    for name in options:
        if name not in known:
            there = f"there are {join_names(known)}" if known else "it has none"
            raise ConfigError(f"store {use}: no option {name!r}; {there}.{suggest_sentence(name, known)}")


def split_address(use: str) -> tuple[str, str]:
    """Split an address into its scheme and the folder or host:port/name. Raises ConfigError; passwords are refused."""
    scheme, colon, rest = use.partition(":")
    if not colon or "/" in scheme:
        return "packed", use
    if find_entry_point(scheme, _GROUP, f"store {scheme!r}", _SHIPPED) is None and scheme not in _SHIPPED:
        raise ConfigError(f"store {use!r}: there are {_SHOWN}.{suggest_sentence(scheme, _SHIPPED)}")
    if "@" in urlsplit(use).netloc:
        place = use.rpartition("@")[2]
        raise ConfigError(
            f"store {scheme}://{place}: a user or password stands in the address; take it out and set "
            f"NONET_{scheme.upper()}_PASSWORD in the environment"
        )
    return scheme, rest.removeprefix("//")


def check_address(use: str) -> None:
    """Raise ConfigError for an address that `open_store` does not know, or that holds a password."""
    scheme, _ = split_address(use)
    if scheme not in _SHIPPED:
        find_store_class(scheme)


def explain_creation_refusal(use: str) -> str:
    """Return why Nonet cannot create stores at addresses of this kind; empty if it can."""
    return find_store_class(split_address(use)[0]).made_elsewhere
