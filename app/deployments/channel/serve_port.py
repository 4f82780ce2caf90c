"""Reaches engine replicas over a Serve handle: calls pinned to one replica, and a call to all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from app.api.engine_client import ReplicaAnswer
from app.deployments.channel.own_context import start_outside
from app.deployments.channel.replica_finder import Discovery
from app.errors import EngineDeadError, MantaError
from app.records.load_report import LoadReport
from app.records.request import EngineRequest

SUBMIT_TIMEOUT_S = 15.0
CONTROL_TIMEOUT_S = 4.0
# How a call over a handle ends that brings no answer: the replica or Serve's controller is gone, hangs, or refuses.
LOST = (MantaError, RayError, RayServeException, TimeoutError)


class EngineHandles:
    """One model's engine deployment, as an ingress calls it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.open_channel = handle.options(method_name="open_channel", stream=True)
        self.submit = handle.options(method_name="submit")
        self.seclude = handle.options(method_name="seclude")
        self.control = handle.options(method_name="control")
        self._metrics_snapshot = handle.options(method_name="metrics_snapshot")
        self.open_feed = handle.options(method_name="open_feed", stream=True)

    async def ping(self, ingress_id: str, timeout_s: float) -> Discovery:
        """The running replicas, asked one and all."""
        try:
            answers = await broadcast(self._handle, "ping", ingress_id, timeout_s=timeout_s)
        except DeploymentUnavailableError:
            return Discovery(frozenset(), complete=True)
        except LOST:
            return Discovery(frozenset(), complete=False)
        reports = tuple(answer for answer in answers if isinstance(answer, LoadReport))
        present = frozenset(report.replica_id for report in reports)
        return Discovery(present, complete=len(present) == len(answers), reports=reports)

    async def metrics_snapshots(self, timeout_s: float) -> list[bytes]:
        """The metrics of the replicas that answer in time."""
        return await metrics_snapshots(self._handle, timeout_s)

    async def control_all(self, name: str, arguments: dict[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        """A control call to every running replica at once; what one does not answer in time is an error of its own.

        EngineDeadError where there is none.
        """
        try:
            limit_s = timeout_s + CONTROL_TIMEOUT_S  # the replica's own limit says more
            answers = await broadcast(self._handle, "run_control", name, arguments, timeout_s, timeout_s=limit_s)
        except LOST as error:
            raise EngineDeadError(f"{name}: no replica could be asked ({type(error).__name__})") from error
        return [answer if isinstance(answer, ReplicaAnswer) else _lost(name, answer) for answer in answers]

    async def metrics_snapshot_of(self, replica_id: str, timeout_s: float) -> bytes | None:
        """The metrics of one replica; None when it does not answer in time."""
        try:
            answer: bytes = await call(self._metrics_snapshot, target=replica_id, timeout_s=timeout_s)
        except LOST:
            return None
        return answer

    def port(self, replica_id: str) -> ServePort:
        """The way to one replica."""
        return ServePort(self, replica_id)


class ServePort:
    """See ReplicaPort."""

    def __init__(self, handles: EngineHandles, replica_id: str) -> None:
        self._handles = handles
        self._replica_id = replica_id

    async def open_channel(self, channel_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        """See ReplicaPort."""
        response = self._handles.open_channel.remote(channel_id, ingress_id, target=self._replica_id)
        try:
            async for frame in response:
                yield frame
        finally:
            response.cancel()

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        """See SubmitPort."""
        refusals: list[MantaError | None] = await call(
            self._handles.submit, channel_id, requests, target=self._replica_id, timeout_s=SUBMIT_TIMEOUT_S
        )
        return refusals

    async def open_feed(self, router_id: str) -> AsyncGenerator[bytes, None]:
        """See FeedPort."""
        response = self._handles.open_feed.remote(router_id, target=self._replica_id)
        try:
            async for frame in response:
                yield frame
        finally:
            response.cancel()

    async def seclude(self, channel_id: str, stream_id: str) -> bool:
        """See ReplicaPort."""
        granted: bool = await call(
            self._handles.seclude, channel_id, stream_id, target=self._replica_id, timeout_s=SUBMIT_TIMEOUT_S
        )
        return granted

    async def control(self, message: bytes) -> None:
        """See ReplicaPort."""
        await call(self._handles.control, message, target=self._replica_id, timeout_s=CONTROL_TIMEOUT_S)


def _lost(name: str, error: BaseException) -> ReplicaAnswer:
    return ReplicaAnswer("", error=EngineDeadError(f"{name}: a replica did not answer ({type(error).__name__})"))


async def metrics_snapshots(handle: Any, timeout_s: float) -> list[bytes]:
    """The metrics of those replicas of a deployment that answer in time."""
    try:
        answers = await broadcast(handle, "metrics_snapshot", timeout_s=timeout_s)
    except LOST:
        return []
    return [answer for answer in answers if isinstance(answer, bytes)]


async def broadcast(handle: Any, method: str, *args: Any, timeout_s: float) -> list[Any]:
    """Asks each running replica, and returns the answers; in the place of one that did not come in time, the exception.

    TimeoutError when not even the call could be sent. Serve's own `results_async` is all or nothing: one replica that
    hangs would hide the answers of all others.
    """
    return await asyncio.shield(start_outside(_answers(handle, method, args, timeout_s)))


async def _answers(handle: Any, method: str, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    response = handle.broadcast(method, *args)
    results = await asyncio.wait_for(response._fetch_replica_results_async(), timeout_s)
    left_s = max(0.0, deadline - time.monotonic())
    waits = [asyncio.wait_for(result.get_async(), left_s) for result in results]
    return await asyncio.gather(*waits, return_exceptions=True)


async def call(handle: Any, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """A unary call outside of the HTTP request's context. TimeoutError when no answer came in time.

    Inside of it, Serve would cancel the call with the request, and would turn a cancellation that arrives here into
    an ordinary exception: a cancelled request would look like a dead replica.
    """
    task = start_outside(answer_of(handle, args, kwargs))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            return task.result()
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    finally:
        task.cancel()


async def answer_of(handle: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The answer of a unary call, which the task that awaits it cancels with itself."""
    return await handle.remote(*args, **kwargs)
