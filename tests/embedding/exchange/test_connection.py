"""Which ranks connect through shared memory; the process group of two ranks is a stand-in with threads."""

from __future__ import annotations

import secrets
import socket
import struct
import threading

import pytest
import torch
import torch.distributed as dist

from nonet.embedding.exchange import connection


@pytest.fixture
def connect(monkeypatch):
    """Return a function that connects two ranks, and returns what each of them gets."""

    def gather(received, own, group):
        for rank, part in enumerate(group.gather(own)):
            received[rank].copy_(part)

    def reduce(value, operation, group):
        assert operation == dist.ReduceOp.MIN
        value.copy_(torch.stack(group.gather(value.clone())).min())

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(connection, "_get_timeout_s", lambda group: 60.0)
    monkeypatch.setattr(connection, "LocalWire", lambda rank, peers, timeout_s: (rank, sorted(peers)))

    def connect_both():
        group, answers = ThreadGroup(), {}
        threads = [
            threading.Thread(
                target=lambda rank=rank: answers.update({rank: connection.connect(rank, group)}),
                name=str(rank),
            )
            for rank in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [answers[rank] for rank in range(2)]

    return connect_both


class ThreadGroup:
    """A process group of two threads, named after their ranks."""

    def __init__(self):
        self._values: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(2, timeout=60)

    def gather(self, own):
        self._values[get_rank()] = own
        self._barrier.wait()
        gathered = [self._values[rank] for rank in range(2)]
        self._barrier.wait()
        return gathered


def get_rank():
    return int(threading.current_thread().name)


def test_ranks_of_one_machine_share_memory(connect, monkeypatch):
    monkeypatch.setattr(connection, "_has_core", lambda: True)
    assert connect() == [(0, [1]), (1, [0])]


@pytest.mark.parametrize("lacks", ["machine", "core"])
def test_ranks_of_two_machines_or_without_the_core_share_no_memory(connect, monkeypatch, lacks):
    own = connection._hash_machine
    monkeypatch.setattr(connection, "_has_core", lambda: lacks != "core" or get_rank() == 0)
    if lacks == "machine":
        monkeypatch.setattr(connection, "_hash_machine", lambda: own() if get_rank() else bytes(range(32)))
    assert connect() == [None, None]


def test_no_rank_shares_memory_if_one_could_not_connect(connect, monkeypatch):
    connect_peers = connection._connect_peers

    def connect_and_fail(rank, listener, contacts):
        peers = connect_peers(rank, listener, contacts)
        return peers if rank == 0 else None

    monkeypatch.setattr(connection, "_has_core", lambda: True)
    monkeypatch.setattr(connection, "_connect_peers", connect_and_fail)
    assert connect() == [None, None]


def test_a_process_that_does_not_know_the_token_is_not_taken_for_a_rank():
    address, token = f"\0nonet-{secrets.token_hex(16)}".encode(), secrets.token_bytes(16)
    contacts = [(bytes(32), address, token), (bytes(32), b"", secrets.token_bytes(16))]
    intruder, rank_1 = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, intruder, rank_1:
        listener.bind(address)
        listener.listen(2)
        listener.settimeout(60)
        for peer, its_token in ((intruder, bytes(16)), (rank_1, token)):
            peer.settimeout(60)
            peer.connect(address)
            peer.send(its_token + struct.pack("<q", 1))
        peers = connection._connect_peers(0, listener, contacts)
        assert peers is not None
        peers[1].send(b"rows")
        assert rank_1.recv(4) == b"rows"
        assert intruder.recv(4) == b"", "its connection is closed"
        peers[1].close()
