"""Whoever reaches the port on which a driver waits for its workers, and pickles on it, is sent away unread."""

from __future__ import annotations

import pickle
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

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
