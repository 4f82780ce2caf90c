"""A channel over a connection of its own, with real sockets, and over the handle where there can be none."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from app.deployments.channel.channel_client import ChannelClient, RequestMovedError
from app.deployments.channel.channel_hub import ChannelHub
from app.deployments.channel.direct_connection import Address
from app.deployments.channel.direct_port import DirectPort, DirectPorts
from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.wire import ControlMessage, decode_control, encode
from app.errors import EngineDeadError, InvalidRequestError, MantaError
from app.records.load_report import LoadReport
from app.records.media import MediaAsk
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests import limits
from tests.deployments.noting_engine import NotingEngine
from tests.deployments.over_tcp import SECRET, NoHandle, be_patient, cut, direct, listen, stranger
from tests.limits import run, until

LOAD = LoadReport("m", "r1", "one", True, 0, 0, 0, 64, 16, 0)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


class Port:
    """A replica in the same process, behind the listener or the handle."""

    def __init__(self, window: int = 8, lease_s: float = 600.0) -> None:
        self.engine = NotingEngine()
        self.hub = ChannelHub(self.engine, window, lease_s)
        self.taken: list[EngineRequest] = []
        self.refusal: MantaError | None = None
        self.fault: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.frames_first = False

    async def open_channel(self, channel_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        channel = self.hub.open(channel_id, ingress_id)
        channel.send([], load=LOAD)
        try:
            async for frame in channel.frames():
                yield frame
        finally:
            self.hub.drop(channel)

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        if self.fault is not None:
            raise self.fault
        if self.refusal is None:
            for stream_id, one in requests:
                self.taken.append(one)
                self.hub.add(channel_id, stream_id, one.request_id)
                if self.frames_first:
                    self.hub.dispatch([EngineOutput(one.request_id, [1])])
        await self.answers.wait()
        return [self.refusal] * len(requests)

    async def seclude(self, channel_id: str, stream_id: str) -> bool:
        return self.hub.seclude(channel_id, stream_id)

    async def control(self, message: bytes) -> None:
        self.hub.control(decode_control(message))


def client_of(port: Any, lease_s: float = 600.0, window: int = 8) -> ChannelClient:
    return ChannelClient(port, "r1", "ingress", window=window, lease_s=lease_s)


async def opened(port: Any, **options: Any) -> ChannelClient:
    client = client_of(port, **options)
    client.start()
    assert await client.wait_open(limits.patience_s())
    assert client.is_live
    return client


def request(name: str = "a", **fields: Any) -> EngineRequest:
    return EngineRequest(name, [1, 2, 3], SamplingParams(max_tokens=100, seed=0), **fields)


async def tokens_of(stream: Any) -> list[list[int]]:
    return [output.new_token_ids async for output in stream.outputs()]


def test_requests_tokens_credits_and_aborts_go_over_the_connection() -> None:
    async def main() -> None:
        replica = Port()
        port = await direct(replica)
        client = await opened(port)
        assert port.is_connected
        a, b = await asyncio.gather(client.submit(request("a")), client.submit(request("b")))
        assert replica.taken == [request("a", arrival_time=replica.taken[0].arrival_time), *replica.taken[1:]]
        replica.hub.dispatch([EngineOutput("a", [1] * 8), EngineOutput("b", [5])])
        assert replica.engine.paused == ["a"]  # its window is full
        outputs = a.outputs()
        assert (await anext(outputs)).new_token_ids == [1] * 8
        coming = asyncio.ensure_future(anext(outputs))  # only who comes back for more has taken what came
        await until(lambda: replica.engine.resumed == ["a"])
        replica.hub.dispatch([EngineOutput("a", [2], "stop"), EngineOutput("b", [6], "length")])
        assert (await coming).finish_reason == "stop"
        assert await tokens_of(b) == [[5], [6]]
        a.close()
        b.close()
        c = await client.submit(request("c"))
        c.close()
        await until(lambda: replica.engine.aborted == ["c"])
        client.close()
        await until(lambda: not port.is_connected)
        await until(lambda: not [*replica.hub.channels])

    run(main())


def test_a_lease_waits_for_no_prompt_on_its_way() -> None:
    async def main() -> None:
        port = await direct(Port())
        client = await opened(port)
        assert port._connection is not None
        port._connection.stream.pause_writing()  # more than a buffer's fill is on its way
        with pytest.raises(StopIteration):  # it ends without having waited
            port.control(encode(ControlMessage(client.channel_id, [], []))).send(None)
        assert port.is_connected
        client.close()

    run(main())


def test_the_first_token_may_overtake_the_answer() -> None:
    async def main() -> None:
        replica = Port()
        replica.frames_first = True
        replica.answers.clear()
        client = await opened(await direct(replica))
        sending = asyncio.ensure_future(client.submit(request()))
        await until(lambda: replica.taken)
        replica.hub.dispatch([EngineOutput("a", [2], "stop")])
        await asyncio.sleep(0)
        assert not sending.done()
        replica.answers.set()
        assert await tokens_of(await sending) == [[1], [2]]
        client.close()

    run(main())


def test_refusals_are_values_and_faults_are_no_end_of_the_connection() -> None:
    async def main() -> None:
        replica = Port()
        client = await opened(await direct(replica))
        replica.refusal = InvalidRequestError("max_tokens: too many", param="max_tokens")
        with pytest.raises(InvalidRequestError, match="too many") as refused:
            await client.submit(request())
        assert refused.value.param == "max_tokens"
        replica.refusal = None
        for fault in (EngineDeadError("it is gone"), ValueError("a bug")):
            replica.fault = fault
            with pytest.raises(EngineDeadError, match=f"cannot be reached.*{fault}"):
                await client.submit(request())
        replica.fault = None
        stream = await client.submit(request("b"))
        replica.hub.dispatch([EngineOutput("b", [1], "stop")])
        assert await tokens_of(stream) == [[1]]
        client.close()

    run(main())


def test_a_stream_may_have_the_replica_for_itself() -> None:
    async def main() -> None:
        replica = Port()
        port = await direct(replica)
        client = await opened(port)
        other = await client.submit(request("other"))
        alone = await client.seclude()
        assert alone is not None
        with pytest.raises(RequestMovedError):
            await tokens_of(other)
        assert await client.seclude() is None
        stream = await client.submit(request("suspect"), alone)
        replica.hub.dispatch([EngineOutput("suspect", [1], "stop")])
        assert await tokens_of(stream) == [[1]]
        client.close()

    run(main())


@pytest.mark.parametrize("side", ["ingress", "replica"])
def test_a_connection_that_is_cut_tells_both_sides_at_once(side: str) -> None:
    async def main() -> None:
        replica = Port()
        listener, address = await listen(replica)
        port = DirectPort(address, SECRET, "r1", NoHandle())
        client = await opened(port)
        stream = await client.submit(request())
        replica.answers.clear()
        under_way = asyncio.ensure_future(client.submit(request("b")))
        await until(lambda: len(replica.taken) == 2)
        replica.hub.dispatch([EngineOutput("a", [1])])
        outputs = stream.outputs()
        assert (await anext(outputs)).new_token_ids == [1]
        if side == "ingress":
            cut(port)
        else:
            for task in listener.sending:
                task.cancel()
        with pytest.raises(EngineDeadError, match="is gone"):
            await anext(outputs)
        with pytest.raises(EngineDeadError):
            await under_way
        assert client.state == "closed"
        with pytest.raises(EngineDeadError, match="closed"):
            await port.control(b"")
        await until(lambda: {*replica.engine.aborted} == {"a", "b"})
        assert not [*replica.hub.channels]
        replica.answers.set()

    run(main())


def test_what_a_replica_says_last_arrives() -> None:
    async def main() -> None:
        replica = Port()
        client = await opened(await direct(replica))
        stream = await client.submit(request())
        replica.hub.dispatch([EngineOutput("a", [1])])
        for _ in range(200):  # what it reads no more must not take its last words away
            client.credit(stream)
        replica.hub.fail("its engine died")
        with pytest.raises(EngineDeadError, match="its engine died"):
            await tokens_of(stream)

    run(main())


def test_a_replica_waits_for_its_channels_before_it_ends() -> None:
    async def main() -> None:
        replica = Port()
        listener, address = await listen(replica)
        client = await opened(DirectPort(address, SECRET, "r1", NoHandle()))
        stream = await client.submit(request())
        client.drain()
        draining = asyncio.ensure_future(listener.drain())
        await until(lambda: replica.hub.retired)
        assert not draining.done()
        replica.hub.dispatch([EngineOutput("a", [1], "stop")])
        assert await tokens_of(stream) == [[1]]
        stream.close()
        await draining
        assert client.state in ("draining", "closed")
        with pytest.raises(OSError):  # nobody listens there any more
            await stranger(address)

    run(main())


def test_what_has_no_form_goes_over_the_handle() -> None:
    async def main() -> None:
        replica = Port()
        port = await direct(replica, handle=replica)
        client = await opened(port)
        picture = MediaAsk(())
        a = await client.submit(request("a", asks=(picture,)))
        b = await client.submit(request("b"))
        assert replica.taken[0].asks[0] is picture  # the very object
        replica.hub.dispatch([EngineOutput("a", [1], "stop"), EngineOutput("b", [2], "stop")])
        assert [await tokens_of(a), await tokens_of(b)] == [[[1]], [[2]]]
        client.close()

    run(main())


def test_what_the_replica_cannot_read_goes_over_the_handle_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unread(data: bytes) -> None:
        raise ValueError("requests that cannot be read")

    async def main() -> None:
        replica = Port()
        client = await opened(await direct(replica, handle=replica))
        monkeypatch.setattr("app.deployments.channel.channel_listener.decode_requests", unread)
        for name in "abc":
            stream = await client.submit(request(name))
            replica.hub.dispatch([EngineOutput(name, [1], "stop")])
            assert await tokens_of(stream) == [[1]]
        client.close()

    run(main())
    assert [one.args for one in caplog.records if "cannot read requests" in one.msg] == [("r1",)]


async def _silent() -> Address:
    """Takes connections and says nothing."""
    server = await asyncio.start_server(lambda reader, writer: asyncio.Event().wait(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    return host, port


async def _closed() -> Address:
    """Refuses connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host, port = free.getsockname()
        return host, port


async def _hangs_up() -> Address:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    return host, port


async def _other_secret() -> Address:
    return (await listen(Port(), secret=b"another cluster's"))[1]


async def _other_replica() -> Address:
    return (await listen(Port(), name="r2"))[1]


@pytest.mark.parametrize("there", [_silent, _closed, _hangs_up, _other_secret, _other_replica])
def test_without_a_connection_the_handle_is_taken_and_that_is_told_once(
    there: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if there is _silent:
        monkeypatch.setattr("app.deployments.channel.direct_connection.FIRST_FRAME_TIMEOUT_S", limits.AT_ONCE_S)

    async def main() -> None:
        replica = Port()
        port = DirectPort(await there(), SECRET, "r1", replica)
        client = await opened(port)
        assert not port.is_connected
        for name in ("a", "b"):
            stream = await client.submit(request(name))
            replica.hub.dispatch([EngineOutput(name, [1], "stop")])
            assert await tokens_of(stream) == [[1]]
        assert await client.seclude() is not None
        client.close()
        await until(lambda: not [*replica.hub.channels])

    with caplog.at_level(logging.WARNING, "manta.channel"):
        run(main())
    told = [record.message for record in caplog.records if "Serve's handle is taken" in record.message]
    assert len(told) == 1
    assert "r1 at 127.0.0.1:" in told[0]


def test_an_ingress_takes_the_way_that_a_replica_tells() -> None:
    handle = NoHandle()

    class Handles:
        def port(self, replica_id: str) -> Any:
            return handle

    def found(*reports: LoadReport, complete: bool = True) -> Discovery:
        return Discovery(frozenset(one.replica_id for one in reports), complete, reports)

    there, nowhere = replace_address(("127.0.0.1", 1)), replace_address(None)
    ports = DirectPorts(Handles(), SECRET)  # type: ignore[arg-type]
    assert ports.port("r1") is handle
    assert ports.learn(found(nowhere)) == found(nowhere)
    assert ports.port("r1") is handle
    ports.learn(found(there))
    assert isinstance(ports.port("r1"), DirectPort)
    ports.learn(found(complete=False))
    assert isinstance(ports.port("r1"), DirectPort)  # it may only have been late
    ports.learn(found())
    assert ports.port("r1") is handle
    without = DirectPorts(Handles(), None)  # type: ignore[arg-type]
    without.learn(found(there))
    assert without.port("r1") is handle
    assert without.num_connected == 0


def replace_address(address: Address | None) -> LoadReport:
    return LoadReport("m", "r1", "one", True, 0, 0, 0, 64, 16, 0, address=address)


def test_connections_are_counted() -> None:
    async def main() -> None:
        replica = Port()
        _, address = await listen(replica)

        class Handles:
            def port(self, replica_id: str) -> Any:
                return NoHandle()

        ports = DirectPorts(Handles(), SECRET)  # type: ignore[arg-type]
        ports.learn(Discovery(frozenset({"r1"}), True, (replace_address(address),)))
        client = await opened(ports.port("r1"))
        assert ports.num_connected == 1
        client.close()
        await until(lambda: ports.num_connected == 0)

    run(main())
