"""The ingress' end of a connection against a real listener: its greeting, its questions, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.deployments.channel.direct_connection import DirectConnection
from app.deployments.channel.direct_messages import Kind
from app.deployments.channel.wire import Opening
from app.errors import EngineDeadError, MantaError
from app.records.request import EngineRequest
from tests.deployments.over_tcp import SECRET, NoHandle, be_patient, listen
from tests.limits import run

OPENING = Opening("i1.c1", "i1", "r1")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


class Silent(NoHandle):
    """A replica that sends two frames and answers no question."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def open_channel(self, channel_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        yield b"first"
        yield b"second"
        await asyncio.Event().wait()

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        raise AssertionError("no requests are sent here")

    async def seclude(self, channel_id: str, stream_id: str) -> bool:
        self.asked.set()
        await asyncio.Event().wait()
        return False


def test_frames_come_in_order_and_a_question_ends_with_the_connection() -> None:
    async def main() -> None:
        replica = Silent()
        _, address = await listen(replica)
        connection = DirectConnection(SECRET, OPENING)
        await connection.connect(address)
        frames = connection.frames()
        assert [await anext(frames), await anext(frames)] == [b"first", b"second"]
        question = asyncio.create_task(connection.ask(Kind.SECLUDE, b"1", 600.0))
        await replica.asked.wait()
        connection.close()
        with pytest.raises(EngineDeadError, match="closed the channel"):
            await question
        with pytest.raises(EngineDeadError, match="closed the channel"):
            await anext(frames)
        with pytest.raises(EngineDeadError, match="closed the channel"):
            connection.tell(Kind.CONTROL, b"")

    run(main())


def test_a_replica_of_another_cluster_is_sent_no_proof_of_the_secret() -> None:
    async def main() -> None:
        _, address = await listen(Silent(), secret=b"another cluster's")
        connection = DirectConnection(SECRET, OPENING)
        with pytest.raises(ConnectionError, match="does not know the cluster's secret"):
            await connection.connect(address)
        assert not connection.stream.is_open

    run(main())
