"""Whoever reaches the port on which a driver waits for its workers, or an engine replica for its ingresses, and pickles
on it, is sent away unread."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.config.ingress import IngressConfig
from app.deployments.channel.channel_listener import ChannelListener
from app.engine.executor.worker_group.rendezvous import Rendezvous, connect
from tests import limits
from tests.security.bomb import Bomb


@pytest.mark.parametrize("is_tcp", [True, False])
def test_a_pickle_before_the_secret_is_not_read(tmp_path: Path, is_tcp: bool) -> None:
    trace = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(trace))
    frame = struct.pack("<Q", len(bomb)) + bomb
    rendezvous = Rendezvous("127.0.0.1")
    with rendezvous, ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(rendezvous.accept, 1, limits.patience_s())
        for content in (bomb, frame, frame * 50, struct.pack("<Q", 1 << 62) + bomb):
            family, address = socket.AF_UNIX, rendezvous.address.unix_path
            if is_tcp:
                family, address = socket.AF_INET, rendezvous.address.tcp  # type: ignore[assignment]
            with socket.socket(family) as stranger:
                stranger.settimeout(limits.patience_s())
                stranger.connect(address)
                stranger.sendall(content)
                stranger.shutdown(socket.SHUT_WR)
        worker, _ = connect(rendezvous.address, 0, same_node=True)
        assert len(accepted.result()) == 1
        worker.close()
    assert not trace.exists()


def test_nor_is_one_by_an_engine_replica(tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(trace))

    async def main() -> None:
        nobody: Any = None  # a call of whom would be an error
        listener = ChannelListener(nobody, b"the secret", IngressConfig())
        address = await listener.start("127.0.0.1")
        assert address is not None
        for content in (bomb, *(struct.pack("<IBI", len(bomb), kind, 0) + bomb for kind in range(10))):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(content)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        await limits.until(lambda: not listener.strangers)
        assert not listener.sending
        await listener.drain()

    limits.run(main())
    assert not trace.exists()
