"""The stores through which ranks meet, without Ray: calls of the actor run in this process."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import ray
import torch
import torch.distributed as dist
from ray.exceptions import ActorDiedError, GetTimeoutError

from nonet.workers.runtime.rendezvous import (
    StoreAddress,
    access_store,
    close_store,
    connect_store,
    host_store,
    interfaces,
    open_store,
    reserve_store,
)
from nonet.workers.runtime.rendezvous.actor_store import ActorStore

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=60)


@pytest.fixture
def actor(monkeypatch):
    """Return an actor whose calls run at once."""
    monkeypatch.setattr(ray, "get", lambda result, timeout: result)
    return SimpleNamespace(access_store=SimpleNamespace(remote=access_store))


@pytest.fixture
def name():
    """Return the name of a store that this process holds."""
    name = reserve_store()
    host_store(name)
    yield name
    close_store(StoreAddress(name, "an actor"))


def use_each_operation(store):
    """Return the results of each operation on a store."""
    prefixed = dist.PrefixStore("epoch-1", store)
    prefixed.set("a", b"\x00\xff")
    prefixed.multi_set(["b", "c"], ["1", "2"])
    prefixed.append("b", "3")
    prefixed.wait(["a", "b"])
    prefixed.wait(["c"], SHORT)
    return [
        *(prefixed.get("a"), prefixed.multi_get(["b", "c"]), store.get("epoch-1/c")),
        *(prefixed.add("n", 2), prefixed.add("n", -5), prefixed.get("n")),
        *(prefixed.check(["a", "b"]), prefixed.check(["a", "absent"])),
        *(prefixed.compare_set("a", "wrong", "x"), prefixed.compare_set("b", "13", "x"), prefixed.get("b")),
        *(prefixed.compare_set("new", "", "x"), prefixed.num_keys()),
        *(prefixed.delete_key("a"), prefixed.delete_key("a"), prefixed.check(["a"]), prefixed.num_keys()),
        *(prefixed.has_extended_api(), prefixed.clone().get("c"), prefixed.timeout),
    ]


def test_keys_in_another_process_behave_as_those_of_torchs_own_store(actor, name):
    own = dist.HashStore()
    own.set_timeout(LONG)
    assert use_each_operation(ActorStore(name, actor, LONG)) == use_each_operation(own)


def test_gloo_connects_ranks_and_reduces_through_the_store(actor, name):
    sums = {}

    def join(rank):
        store = host_store_of_rank[rank]
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 3, LONG)
        sums[rank] = torch.tensor([rank + 1.0])
        group.allreduce(sums[rank]).wait()

    held = connect_store(StoreAddress(name), 3, LONG)
    host_store_of_rank = [held, ActorStore(name, actor, LONG), ActorStore(name, actor, LONG)]
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(sums[rank]) for rank in range(3)] == [6.0, 6.0, 6.0]
    assert isinstance(held, dist.HashStore), "the process that holds the keys asks no actor"


def test_a_read_waits_for_its_key_without_holding_a_thread_of_the_actor(actor, name):
    asked = []
    actor.access_store.remote = lambda *call: asked.append(call) or access_store(*call)
    reader = ActorStore(name, actor, LONG)
    threading.Timer(0.1, lambda: access_store(name, "set", "late", b"1")).start()
    assert reader.get("late") == b"1"
    assert len(asked) > 1
    with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.2 s for the keys never"):
        reader.wait(["never"], SHORT)
    with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.2 s for the keys never"):
        ActorStore(name, actor, SHORT).get("never")


def test_a_store_that_is_reserved_is_waited_for_until_it_is_created(actor):
    reserved = reserve_store()
    store = ActorStore(reserved, actor, LONG)
    threading.Timer(0.1, lambda: host_store(reserved).set("open", "")).start()
    store.wait(["open"])
    assert store.check(["open"])
    close_store(StoreAddress(reserved, "an actor"))


def test_a_lost_process_of_the_store_is_a_lost_connection_and_a_late_one_a_time_out(monkeypatch, actor, name):
    def fail(error):
        def get(result, timeout):
            raise error

        monkeypatch.setattr(ray, "get", get)
        return ActorStore(name, actor, SHORT)

    with pytest.raises(dist.DistNetworkError, match="connection closed by the rank that holds the store"):
        fail(ActorDiedError()).check(["a"])
    with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.2 s for the rank that holds the store"):
        fail(GetTimeoutError()).check(["a"])


def test_a_process_answers_only_operations_that_do_not_wait_on_stores_that_it_holds(name):
    access_store(name, "set", "a", "1")
    with pytest.raises(LookupError, match="a store has no operation 'get'; it has add, append, check"):
        access_store(name, "get", "a")
    close_store(StoreAddress(name, "an actor"))
    with pytest.raises(LookupError, match="this process does not hold the store"):
        access_store(name, "check", ["a"])


def test_outside_ray_the_keys_are_in_a_file_of_this_user_that_closing_removes(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    address = open_store()
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    connect_store(address, 2, LONG).set("a", "1")
    assert connect_store(address, 2, LONG).get("a") == b"1"
    close_store(address)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("addresses", "given", "chosen"),
    [
        (["10.0.0.1", "10.0.0.1"], {}, ("lo", "=eth1", "=eth1")),
        (["10.0.0.1", "10.0.0.2"], {}, ("eth1", "=eth1", "=eth1")),
        (["10.0.0.9", "10.0.0.2"], {}, (None, None, None)),
        (["10.0.0.1", "10.0.0.2"], {"NCCL_SOCKET_IFNAME": "ib"}, ("eth1", "ib", "=eth1")),
    ],
)
def test_backends_listen_on_loopback_or_on_rays_address_or_where_the_user_says(
    monkeypatch, addresses, given, chosen
):
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
    for variable in variables:
        monkeypatch.setenv(variable, given.get(variable, ""))
    held = {"lo": "127.0.0.1", "eth0": "192.168.0.1", "eth1": "10.0.0.1"}
    found = {interface: [SimpleNamespace(address=address)] for interface, address in held.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    monkeypatch.setattr(interfaces, "_get_node_address", lambda: addresses[0])
    interfaces._list_given_interfaces.cache_clear()
    store = dist.HashStore()
    store.set("node-address/1", addresses[1])
    for _ in range(2):  # the second group keeps what the user has set, and chooses anew
        interfaces.choose_interfaces(store, 0, 2)
        assert tuple(interfaces.os.environ.get(variable) for variable in variables) == chosen
    interfaces._list_given_interfaces.cache_clear()


def test_ranks_that_move_to_another_node_leave_loopback(monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")
    held = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}
    monkeypatch.setattr(
        "psutil.net_if_addrs",
        lambda: {interface: [SimpleNamespace(address=address)] for interface, address in held.items()},
    )
    monkeypatch.setattr(interfaces, "_get_node_address", lambda: "10.0.0.1")
    interfaces._list_given_interfaces.cache_clear()
    chosen = []
    for other in ("10.0.0.1", "10.0.0.2"):
        store = dist.HashStore()
        store.set("node-address/1", other)
        interfaces.choose_interfaces(store, 0, 2)
        chosen.append(interfaces.os.environ["GLOO_SOCKET_IFNAME"])
    interfaces._list_given_interfaces.cache_clear()
    assert chosen == ["lo", "eth0"]
