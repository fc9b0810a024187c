"""Opens and creates stores by address: a folder, lmdb:FOLDER, redis://HOST:PORT/NAME or hbase://HOST:PORT/TABLE."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from nonet.contracts import check_class, find_entry_point
from nonet.errors import ConfigError
from nonet.options import find_wrong_option
from nonet.plugins import load_heavy
from nonet.samples.stores.base import Store
from nonet.suggest import join_names, suggest_sentence

_ENTRY_POINT_GROUP = (
    "nonet.stores"  # Other packages register a scheme of addresses and a subclass of Store here.
)
_DOCS_PAGE = "docs/how-to/stores.md"
_BUILT_IN = {
    "packed": "nonet.samples.stores.packed:PackedStore",
    "lmdb": "nonet.samples.stores.lmdb:LMDBStore",
    "redis": "nonet.samples.stores.redis:RedisStore",
    "hbase": "nonet.samples.stores.hbase:HBaseStore",
}
# For messages.
_ADDRESS_FORMS = "a folder, lmdb:FOLDER, redis://HOST:PORT/NAME and hbase://HOST:PORT/TABLE"


def create_store(
    use: str, schema: pa.Schema, *, key: pa.DataType, versions: bool = False, **options: Any
) -> Store:
    """Create an empty store at an address.

    Args:
        use: The address.
        schema: Names and types of the columns.
        key: Type of the keys: any integer or text.
        versions: Whether each row has a time, so that a key can have several rows.
        **options: Options of the store.

    Raises:
        ConfigError: If there is a store at the address already, Nonet cannot create stores of this kind, or a column has a name
            of `Store.scan`.
    """
    scheme, location = split_address(use)
    cls = find_store_class(scheme)
    if cls.made_elsewhere:
        raise ConfigError(f"store {use}: {cls.made_elsewhere}: {cls.creation_command}")
    check_options(use, options)
    for name in ("key", "time") if versions else ("key",):  # see `Store.scan`
        if name in schema.names:
            raise ConfigError(
                f"store {use}: {name!r} is the store's own column of {name}s, so no other column can have this name; rename the "
                "column, or leave it out by naming the others: --column NAME"
            )
    return cls.create(location, schema, key=key, versions=versions, **options)


def open_store(use: str, columns: Sequence[str] | Mapping[str, str] | None = None, **options: Any) -> Store:
    """Open the store at an address.

    Args:
        use: A folder of packed segments, `lmdb:folder`, `redis://host:port/name` or `hbase://host:port/table`.
        columns: Columns of an HBase table, name -> "family:qualifier type"; other stores know their columns.
        **options: Options of the store.

    Raises:
        ConfigError: If the address or an option is not valid.
        StoreNotFoundError: If there is no store at the address.
    """
    scheme, location = split_address(use)
    cls = find_store_class(scheme)
    check_options(use, options)
    if cls.takes_columns:
        options = {"columns": columns, **options}
    return cls(location, **options)


def find_store_class(scheme: str) -> Any:
    """Return the class of the stores at addresses with this scheme, Nonet's own or that of an installed package.

    Raises:
        ConfigError: If several packages register the scheme, or the class does not meet the contract of a store.
    """
    title = f"store {scheme!r}"
    entry_point = find_entry_point(scheme, _ENTRY_POINT_GROUP, title, _BUILT_IN)
    if entry_point is None:
        return load_heavy(_BUILT_IN[scheme])
    cls = load_heavy(entry_point.value)
    check_class(cls, Store, title, _DOCS_PAGE)
    if not cls.made_elsewhere and not callable(getattr(cls, "create", None)):
        raise ConfigError(
            f"{title} ({entry_point.value}): class {cls.__name__} has no create; see {_DOCS_PAGE}"
        )
    return cls


def check_options(use: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that the stores at addresses of this kind do not have, or that has a wrong type."""
    cls = find_store_class(split_address(use)[0])
    if (wrong := find_wrong_option(cls, options)) is not None:
        name, reason = wrong
        raise ConfigError(f"store {use}: the option {name} is {options[name]!r}; {reason}")
    parameters = inspect.signature(cls).parameters.values()
    known_options = [
        parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return  # The class checks its options itself.
    for name in options:
        if name not in known_options:
            available = f"there are {join_names(known_options)}" if known_options else "it has none"
            raise ConfigError(
                f"store {use}: no option {name!r}; {available}.{suggest_sentence(name, known_options)}"
            )


def split_address(use: str) -> tuple[str, str]:
    """Split an address into its scheme and the folder or host:port/name.

    Raises:
        ConfigError: If the scheme is unknown, or the address has a user or password.
    """
    scheme, colon, location = use.partition(":")
    if not colon or "/" in scheme:
        return "packed", use  # A path of a folder.
    if (
        find_entry_point(scheme, _ENTRY_POINT_GROUP, f"store {scheme!r}", _BUILT_IN) is None
        and scheme not in _BUILT_IN
    ):
        raise ConfigError(f"store {use!r}: there are {_ADDRESS_FORMS}.{suggest_sentence(scheme, _BUILT_IN)}")
    if "@" in urlsplit(use).netloc:
        address_without_user = use.rpartition("@")[2]
        raise ConfigError(
            f"store {scheme}://{address_without_user}: a user or password stands in the address; take it out and set "
            f"NONET_{scheme.upper()}_PASSWORD in the environment"
        )
    return scheme, location.removeprefix("//")


def check_address(use: str) -> None:
    """Raise ConfigError for an address that `open_store` does not know, or that holds a password."""
    scheme, _ = split_address(use)
    if scheme not in _BUILT_IN:
        find_store_class(scheme)


def is_in_files(use: str) -> bool:
    """Return whether an address is a folder of this machine, as those of packed and LMDB stores are."""
    return find_store_class(split_address(use)[0]).is_in_files


def explain_creation_refusal(use: str) -> str:
    """Return why Nonet cannot create stores at addresses of this kind; empty if it can."""
    return find_store_class(split_address(use)[0]).made_elsewhere
