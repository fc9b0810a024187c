"""Plug-ins that break the contract of their kind are refused in one line."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pyarrow as pa
import pytest

from nonet import Reward, contracts
from nonet.contracts import check_class
from nonet.errors import ConfigError
from nonet.rl.rewards.remote import make_reward_class
from nonet.samples.stores import Store, check_address, create_store, open_store


class Complete(Store):
    """A store that is complete."""

    def __init__(self, address: str):
        self.name = f"store {address}"

    @classmethod
    def create(cls, address: str, schema: Any, **facts: Any) -> Complete:
        return cls(address)

    def _get(self, keys: Any, columns: list[str], before: Any) -> Any: ...
    def put(self, keys: Any, values: Any, times: Any = None) -> None: ...
    def scan(self, columns: Any = None) -> Any: ...
    def collect_stats(self) -> dict[str, Any]:
        return {}


class WithoutStats(Store):
    def _get(self, keys: Any, columns: list[str], before: Any) -> Any: ...
    def put(self, keys: Any, values: Any, times: Any = None) -> None: ...
    def scan(self, columns: Any = None) -> Any: ...


class PutsWithoutTimes(Complete):
    def put(self, keys: Any, values: Any) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]


class GrpcReward(Reward):
    def score(self, r: Any) -> Any: ...


def _install(
    monkeypatch: pytest.MonkeyPatch, scheme: str, *classes: str, group: str = "nonet.stores"
) -> None:
    """Pretend that packages offer these classes of this file under this name in a group of entry points."""
    points = [EntryPoint(scheme, f"{__name__}:{name}", group) for name in classes]
    monkeypatch.setattr(contracts, "_read_entry_points", lambda: EntryPoints(points))


def test_a_store_of_an_installed_package_is_opened_and_created_by_its_scheme(monkeypatch: pytest.MonkeyPatch):
    _install(monkeypatch, "cassandra", "Complete")
    check_address("cassandra://host:1/items")
    assert open_store("cassandra://host:1/items").name == "store host:1/items"
    assert (
        create_store("cassandra://host:1/items", pa.schema([]), key=pa.int64()).name == "store host:1/items"
    )


@pytest.mark.parametrize(
    ("scheme", "classes", "message"),
    [
        (
            "cassandra",
            ["WithoutStats"],
            r"test_contracts.py\): class WithoutStats has no collect_stats; see docs/how-to/stores.md",
        ),
        ("cassandra", ["PutsWithoutTimes"], r"PutsWithoutTimes.put does not accept \(self, keys"),
        ("cassandra", ["_install"], "expected a subclass of Store"),
        ("cassandra", ["Complete", "WithoutStats"], "the name is taken"),
        ("redis", ["Complete"], "the name is taken, Nonet ships it"),
    ],
)
def test_a_store_that_breaks_its_contract_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, scheme: str, classes: list[str], message: str
):
    _install(monkeypatch, scheme, *classes)
    with pytest.raises(ConfigError, match=message) as raised:
        check_address(f"{scheme}://host:1/items")
    assert "\n" not in str(raised.value)


def test_a_reward_scheme_of_an_installed_package_is_found_and_its_name_cannot_be_a_shipped_one(
    monkeypatch: pytest.MonkeyPatch,
):
    _install(monkeypatch, "grpc", "GrpcReward", group="nonet.reward_schemes")
    found = make_reward_class("grpc://host:1/fresh", "reward 'fresh'")
    assert issubclass(found, GrpcReward)
    assert found.url == "grpc://host:1/fresh"  # pyright: ignore[reportAttributeAccessIssue]
    _install(monkeypatch, "grpc", "Complete", group="nonet.reward_schemes")
    with pytest.raises(ConfigError, match="expected a subclass of Reward"):
        make_reward_class("grpc://host:1/fresh", "reward 'fresh'")
    _install(monkeypatch, "http", "GrpcReward", group="nonet.reward_schemes")
    with pytest.raises(ConfigError, match="the name is taken, Nonet ships it"):
        make_reward_class("http://host:1/fresh", "reward 'fresh'")


class _Opener:
    def open(self, path: str, *, mode: str = "r") -> None: ...


class _Faithful(_Opener):
    def open(self, path: str, *, mode: str = "r") -> None: ...


class _WithoutMode(_Opener):
    def open(self, path: str) -> None: ...  # type: ignore[override]


def test_arguments_by_keyword_are_part_of_a_contract():
    check_class(_Faithful, _Opener, "opener 'a'", "docs/how-to/extend.md")
    with pytest.raises(ConfigError, match=r"_WithoutMode\.open does not accept"):
        check_class(_WithoutMode, _Opener, "opener 'b'", "docs/how-to/extend.md")
