"""Driver and workers meet, on one node and across two, without Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.executor.worker_group.connection import ConnectionLostError, FrameConnection
from app.engine.executor.worker_group.rendezvous import Address, Rendezvous, connect
from tests import limits


@contextmanager
def accepting(
    rendezvous: Rendezvous, count: int, timeout_s: float | None = None
) -> Iterator[Future[list[FrameConnection]]]:
    """The driver, waiting for its workers in a thread of its own."""
    with rendezvous, ThreadPoolExecutor(1) as thread:
        yield thread.submit(rendezvous.accept, count, timeout_s or limits.patience_s())


def test_workers_of_this_and_of_another_node_take_their_ranks() -> None:
    rendezvous = Rendezvous("127.0.0.1")
    directory = os.path.dirname(rendezvous.address.unix_path)
    assert os.stat(directory).st_mode & 0o077 == 0  # others may not enter
    with accepting(rendezvous, 3) as accepted:
        found = {rank: connect(rendezvous.address, rank, rank != 2)[0] for rank in (2, 0, 1)}
        connections = accepted.result()
    assert not os.path.exists(directory)
    for rank, connection in enumerate(connections):
        connection.send(b"you are %d" % rank)
        assert found[rank].recv(limits.patience_s()) == b"you are %d" % rank


def test_strangers_are_sent_away() -> None:
    """A wrong secret, a rank twice, a rank out of range and plain rubbish; then the right one is still let in."""
    rendezvous = Rendezvous("127.0.0.1")
    address = rendezvous.address
    assert address.tcp is not None
    with accepting(rendezvous, 2) as accepted:
        with socket.create_connection(address.tcp) as rubbish:
            rubbish.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ConnectionLostError, match="does not know the secret"):
            connect(replace(address, secret=b"x" * 32), 0, same_node=True)
        out_of_range, _ = connect(address, 7, same_node=True)
        first, _ = connect(address, 0, same_node=True)
        twice, _ = connect(address, 0, same_node=True)
        second, _ = connect(address, 1, same_node=False)
        connections = accepted.result()
    assert len(connections) == 2
    assert out_of_range.hung_up(limits.patience_s())
    assert twice.hung_up(limits.patience_s())
    connections[0].send(b"welcome")
    assert first.recv(limits.patience_s()) == b"welcome"
    second.close()


def overheard(address: Address) -> bytes:
    """All that a worker says to somebody who only pretends to be the driver, at its address."""
    assert address.tcp is not None
    said = b""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        worker = thread.submit(connect, replace(address, tcp=listener.getsockname()[:2]), 0, False)
        peer, _ = listener.accept()
        with peer:
            peer.sendall((64).to_bytes(8, "little") + bytes(64))
            while chunk := peer.recv(1 << 16):
                said += chunk
        with pytest.raises(ConnectionLostError, match="does not know the secret"):
            worker.result()
    return said


def test_a_worker_tells_a_false_driver_nothing_of_use() -> None:
    rendezvous = Rendezvous("127.0.0.1")
    with rendezvous:
        said = overheard(rendezvous.address)
    assert rendezvous.address.secret not in said
    assert len(said) == 8 + 36  # its hello


class Wire:
    """Passes on what goes between one worker and the driver, and keeps it."""

    def __init__(self, driver: tuple[str, int]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.said = b""
        self._driver = driver
        self._thread = threading.Thread(target=self._pass_on)
        self._thread.start()

    def _pass_on(self) -> None:
        worker, _ = self.listener.accept()
        with worker, socket.create_connection(self._driver) as driver:
            for source, target, count in ((worker, driver, 44), (driver, worker, 72), (worker, driver, 40)):
                part = b""
                while len(part) < count:
                    part += source.recv(count - len(part))
                target.sendall(part)
                self.said += part if source is worker else b""

    def close(self) -> bytes:
        self._thread.join()
        self.listener.close()
        return self.said


def test_what_was_overheard_opens_nothing() -> None:
    """Neither is the secret in it, nor can it be said a second time."""
    rendezvous = Rendezvous("127.0.0.1")
    address = rendezvous.address
    assert address.tcp is not None
    with accepting(rendezvous, 2) as accepted:
        wire = Wire(address.tcp)
        honest, _ = connect(replace(address, tcp=wire.listener.getsockname()[:2]), 0, same_node=False)
        said = wire.close()
        assert address.secret not in said
        replayed = said[:40] + (1).to_bytes(4, "little") + said[44:]  # as rank 1
        for words in (said, replayed):
            with socket.create_connection(address.tcp) as thief:
                thief.sendall(words)
                thief.settimeout(limits.patience_s())
                while thief.recv(1 << 16):
                    pass  # until the driver hangs up
        assert not accepted.done()
        second, _ = connect(address, 1, same_node=False)
        assert len(accepted.result()) == 2
    honest.close()
    second.close()


def test_a_worker_of_this_node_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it has no turn at a core for seconds."""
    monkeypatch.setattr("app.engine.executor.worker_group.rendezvous._GREETING_TIMEOUT_S", 0.0)
    rendezvous = Rendezvous(None)
    with accepting(rendezvous, 1) as accepted:
        connection, _ = connect(rendezvous.address, 0, same_node=True)
        assert len(accepted.result()) == 1
    connection.close()


def test_a_worker_that_says_nothing_keeps_no_check_waiting() -> None:
    """The process behind it may be dead, which only the check can tell."""
    checks = 0

    def third_fails() -> None:
        nonlocal checks
        checks += 1
        if checks == 3:  # before the greeting, at its begin, and after a wait in it
            raise RuntimeError("the worker is dead")

    with Rendezvous(None) as rendezvous, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(rendezvous.address.unix_path)
        with pytest.raises(RuntimeError, match="the worker is dead"):
            rendezvous.accept(1, limits.patience_s(), check=third_fails)


def test_a_greeting_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [100.0], []

    class Slow:
        """Takes three seconds for each frame."""

        def limited(self, num_bytes: int) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def send(self, payload: bytes, timeout_s: float) -> None:
            waits.append(timeout_s)
            now[0] += 3.0

        def recv(self, timeout_s: float) -> bytes:
            self.send(b"", timeout_s)
            return b""

    peer: Any = Slow()
    monkeypatch.setattr("app.engine.executor.worker_group.rendezvous.time", SimpleNamespace(monotonic=lambda: now[0]))
    with Rendezvous(None) as rendezvous:
        assert rendezvous._greet(peer, 108.0) is None
    assert waits == [8.0, 5.0, 2.0]


def test_missing_ranks_are_named() -> None:
    rendezvous = Rendezvous(None)
    assert rendezvous.address.tcp is None
    with accepting(rendezvous, 3, limits.scaled_s(1.0)) as accepted:
        keep, _ = connect(rendezvous.address, 1, same_node=True)
        with pytest.raises(TimeoutError, match=r"workers \[0, 2\] did not connect"):
            accepted.result()
        keep.close()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="pidfd is Linux")
def test_the_driver_process_is_watched() -> None:
    rendezvous = Rendezvous(None)
    with accepting(rendezvous, 1):
        connection, driver = connect(rendezvous.address, 0, same_node=True)
        assert driver is not None
        with open(f"/proc/self/fdinfo/{driver}", encoding="ascii") as info:
            assert f"Pid:\t{os.getpid()}" in info.read()
        os.close(driver)
        connection.close()
