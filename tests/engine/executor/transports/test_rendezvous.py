"""Driver and workers meet, on one node and across two, without Ray."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace

import pytest

from app.engine.executor.transports.connection import FrameConnection
from app.engine.executor.transports.rendezvous import Address, Rendezvous, connect
from tests import limits


def join(address: Address, rank: int, same_node: bool, found: dict[int, FrameConnection]) -> None:
    found[rank], _ = connect(address, rank, same_node)


def test_workers_of_this_and_of_another_node_take_their_ranks() -> None:
    found: dict[int, FrameConnection] = {}
    with Rendezvous("127.0.0.1") as rendezvous:
        directory = os.path.dirname(rendezvous.address.unix_path)
        assert os.stat(directory).st_mode & 0o077 == 0  # others may not enter
        workers = [
            threading.Thread(target=join, args=(rendezvous.address, rank, rank != 2, found)) for rank in (2, 0, 1)
        ]
        for worker in workers:
            worker.start()
        connections = rendezvous.accept(3, limits.patience_s())
        for worker in workers:  # it has connected, but its thread may not have said so yet
            worker.join()
    assert not os.path.exists(directory)
    for rank, connection in enumerate(connections):
        connection.send(b"you are %d" % rank)
        assert found[rank].recv(limits.patience_s()) == b"you are %d" % rank


def test_strangers_are_sent_away() -> None:
    """A wrong secret, a rank twice, a rank out of range and plain rubbish; then the right one is still let in."""
    found: dict[int, FrameConnection] = {}
    with Rendezvous("127.0.0.1") as rendezvous:
        address = rendezvous.address
        assert address.tcp is not None
        with socket.create_connection(address.tcp) as rubbish:
            rubbish.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger, _ = connect(replace(address, secret=b"x" * 32), 0, same_node=True)
        out_of_range, _ = connect(address, 7, same_node=True)
        join(address, 0, True, found)
        twice, _ = connect(address, 0, same_node=True)
        join(address, 1, False, found)
        connections = rendezvous.accept(2, limits.patience_s())
    assert len(connections) == 2
    assert stranger.hung_up(limits.patience_s())
    assert out_of_range.hung_up(limits.patience_s())
    assert twice.hung_up(limits.patience_s())
    connections[0].send(b"welcome")
    assert found[0].recv(limits.patience_s()) == b"welcome"


def test_missing_ranks_are_named() -> None:
    with Rendezvous(None) as rendezvous:
        assert rendezvous.address.tcp is None
        keep, _ = connect(rendezvous.address, 1, same_node=True)
        with pytest.raises(TimeoutError, match=r"workers \[0, 2\] did not connect"):
            rendezvous.accept(3, 0.3)
        keep.close()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd is Linux")
def test_the_driver_process_is_watched() -> None:
    with Rendezvous(None) as rendezvous:
        connection, driver = connect(rendezvous.address, 0, same_node=True)
        assert driver is not None
        with open(f"/proc/self/fdinfo/{driver}", encoding="ascii") as info:
            assert f"Pid:\t{os.getpid()}" in info.read()
        os.close(driver)
        connection.close()
