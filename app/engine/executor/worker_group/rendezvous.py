"""Lets driver and workers meet: the driver listens, each worker connects, and each shows that it knows the secret.

Frames carry pickles, so neither end believes the other before it has proved itself (app/challenge.py). The secret
travels through Ray (or a pipe). The unix socket lies in a directory that only this user can enter, and both listeners
close once all workers are connected.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from app.challenge import GREETING_BYTES, NONCE_BYTES, new_nonce, proof, proves
from app.engine.executor.worker_group.connection import ConnectionLostError, FrameConnection

_CHECK_S = 0.1
_GREETING_TIMEOUT_S = 5.0  # a peer that comes over TCP answers at once, or is not ours
_ANSWER_TIMEOUT_S = 120.0  # the driver greets one peer after another, strangers among them


@dataclass(frozen=True, slots=True)
class Address:
    """Holds what a worker needs to connect: `unix_path` on the driver's node, else `tcp`."""

    unix_path: str
    tcp: tuple[str, int] | None
    secret: bytes


class Rendezvous:
    """The driver's listeners, for the time in which the workers connect; a context manager."""

    def __init__(self, tcp_host: str | None) -> None:
        """Listen on a unix socket, and on `tcp_host` too when some workers run on other nodes."""
        self._directory = tempfile.mkdtemp(prefix="manta-steps-")
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners = [unix]
        path = os.path.join(self._directory, "steps")
        unix.bind(path)
        unix.listen(128)
        tcp_address = None
        if tcp_host is not None:
            family = socket.AF_INET6 if ":" in tcp_host else socket.AF_INET
            tcp = socket.create_server((tcp_host, 0), family=family, backlog=128)
            self._listeners.append(tcp)
            tcp_address = (tcp_host, int(tcp.getsockname()[1]))
        self._poll = select.poll()
        for listener in self._listeners:
            self._poll.register(listener, select.POLLIN)
        self.address = Address(path, tcp_address, secrets.token_bytes(32))

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def accept(
        self, world_size: int, timeout_s: float, per_rank: int = 1, check: Callable[[], None] | None = None
    ) -> list[FrameConnection]:
        """The workers' connections in the order of their ranks; with several per rank, connection i of rank r is
        number i * world_size + r. TimeoutError names the ranks that did not come.

        `check` is called now and then, and may raise.
        """
        deadline = time.monotonic() + timeout_s
        arrived: dict[int, FrameConnection] = {}
        count = world_size * per_rank
        while len(arrived) < count:
            if check is not None:
                check()
            left_s = _left_s(deadline)
            ready = self._poll.poll((left_s if check is None else min(left_s, _CHECK_S)) * 1000)
            if not ready and time.monotonic() < deadline:
                continue
            if not ready:
                missing = sorted({number % world_size for number in set(range(count)) - arrived.keys()})
                raise TimeoutError(f"workers {missing} did not connect within {timeout_s:.0f} s")
            sock, _ = next(listener for listener in self._listeners if listener.fileno() == ready[0][0]).accept()
            _configure(sock)
            connection = FrameConnection(sock)
            # The unix socket's are this user's: one that is slow has no turn at a core.
            may_be_ours = sock.family == socket.AF_UNIX
            soon = time.monotonic() + _GREETING_TIMEOUT_S
            rank = self._greet(connection, max(soon, deadline) if may_be_ours else soon, check)
            if rank is None or rank in arrived or rank >= count:
                connection.close()
            else:
                arrived[rank] = connection
        return [arrived[number] for number in range(count)]

    def _greet(
        self, connection: FrameConnection, deadline: float, check: Callable[[], None] | None = None
    ) -> int | None:
        """The rank of a worker that has shown the secret by then; None of anybody else."""
        secret, own = self.address.secret, new_nonce()
        try:
            with connection.limited(GREETING_BYTES):
                hello = _heard(connection, deadline, check)
                connection.send(own + proof(secret, b"driver", hello, own), _left_s(deadline))
                shown = _heard(connection, deadline, check)
        except (ConnectionLostError, TimeoutError):
            return None
        if len(hello) != NONCE_BYTES + 4 or not proves(shown, secret, b"worker", hello, own):
            return None
        return int.from_bytes(hello[NONCE_BYTES:], "little")


def _heard(connection: FrameConnection, deadline: float, check: Callable[[], None] | None) -> bytes:
    """The next frame; TimeoutError where none has come by then. What has come of it stays from one wait to the next."""
    while True:
        if check is not None:
            check()
        left_s = _left_s(deadline)
        wait_s = left_s if check is None else min(left_s, _CHECK_S)
        try:
            return connection.recv(wait_s)
        except TimeoutError:
            if wait_s == left_s:
                raise


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def connect(address: Address, rank: int, same_node: bool) -> tuple[FrameConnection, int | None]:
    """Connect a worker. Returns the connection and, on the driver's node, a pidfd of the driver where there is one.

    ConnectionLostError when what answers is not the driver; TimeoutError when nothing does.
    """
    if same_node:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(address.unix_path)
    else:
        assert address.tcp is not None, "a worker on another node needs the TCP listener"
        sock = socket.create_connection(address.tcp)
    _configure(sock)
    driver = _peer_pidfd(sock) if same_node else None
    connection = FrameConnection(sock)
    try:
        _introduce(connection, address.secret, rank)
    except BaseException:
        connection.close()
        raise
    return connection, driver


def _introduce(connection: FrameConnection, secret: bytes, rank: int) -> None:
    """The worker's side of `_greet`."""
    hello = new_nonce() + rank.to_bytes(4, "little")
    with connection.limited(GREETING_BYTES):
        connection.send(hello, _ANSWER_TIMEOUT_S)
        answer = connection.recv(_ANSWER_TIMEOUT_S)
    nonce, shown = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not proves(shown, secret, b"driver", hello, nonce):
        raise ConnectionLostError("what answered at the driver's address does not know the secret")
    connection.send(proof(secret, b"worker", hello, nonce), _ANSWER_TIMEOUT_S)


def _configure(sock: socket.socket) -> None:
    """TCP only: no delay, and a host that vanished without a word is noticed after about 15 s."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)


def _peer_pidfd(sock: socket.socket) -> int | None:
    """A pidfd of the process that listens at the other end; it outwits a socket copied into a forked child."""
    if sys.platform != "linux":
        return None
    pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
    with contextlib.suppress(OSError):  # an old kernel, or a process of another namespace: the socket alone tells
        return os.pidfd_open(pid)
    return None
