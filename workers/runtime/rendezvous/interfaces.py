"""The network interfaces on which the ranks of a process group listen for each other's data.

The connections of gloo, NCCL and HCCL have no token, so they are on no more interfaces than they need.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from nonet.workers.runtime.rendezvous.stores import get_own_actor

_LOOPBACK = "127.0.0.1"
# Maps the variable of each backend that names its network interface to the prefix that makes it match the whole name.
_INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "=", "HCCL_SOCKET_IFNAME": "="}


def choose_interfaces(store: Any, rank: int, world: int) -> None:
    """Choose the network interfaces on which backends listen, where the environment of the process does not name one.

    gloo uses loopback if all ranks are on one node. Otherwise it uses the interface of Ray's address, as NCCL and HCCL always do:
    they keep the interface of the first group, and a rank of a later one may be on another node.
    """
    address = _get_node_address()
    store.set(f"node-address/{rank}", address)
    addresses = store.multi_get([f"node-address/{other}" for other in range(world)])
    shared = len(set(addresses)) == 1
    for variable in _INTERFACE_VARIABLES.keys() - _list_given_interfaces():
        interface = _find_interface(_LOOPBACK if shared and variable == "GLOO_SOCKET_IFNAME" else address)
        os.environ.pop(variable, None)
        if interface:
            os.environ[variable] = _INTERFACE_VARIABLES[variable] + interface


@functools.cache
def _list_given_interfaces() -> frozenset[str]:
    """Return the variables of interfaces that were set when this process first joined a group."""
    return frozenset(variable for variable in _INTERFACE_VARIABLES if os.environ.get(variable))


def _find_interface(address: str) -> str:
    """Return the name of this machine's network interface that has an address, "" if none has."""
    import psutil

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, held in interfaces if address in {entry.address for entry in held}), "")


def _get_node_address() -> str:
    """Return the address by which Ray knows this node, or the loopback address outside a Ray actor."""
    import ray

    return _LOOPBACK if get_own_actor() is None else ray.util.get_node_ip_address()
