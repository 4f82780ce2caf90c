"""Steps over a Ray compiled graph: one input fans out to every worker's `step`, all replies come back.

The only file that knows ray.dag, and its traps:
- a graph spins while it waits, in the workers and in the driver. So each worker rings its socket when a step is done
  and the driver sleeps until all have rung; parked workers sleep inside a step until their socket brings a frame;
- a read that times out half-way loses what it has read of the other channels: we read only what is there;
- a payload larger than a channel's buffer resizes the channel, after which teardown hangs: such payloads take the
  socket. The buffer size counts only as the context's value in every process (the argument of compile is ignored);
- teardown waits for workers without a limit: it runs aside, for a bounded time, or after they were killed;
- teardown opens what it closes, and where a worker that died in its first step has taken a channel with it, Ray aborts
  this process: we open them all at once;
- Ray's own process of the driver's node dies of a reply from another node that comes after the teardown has begun;
- a graph's named semaphores stay in /dev/shm for good: we take their names away after the first step (semaphores.py).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

from ray.dag import DAGContext, InputNode, MultiOutputNode
from ray.exceptions import RayChannelTimeoutError

from app.engine.executor.transports.base import StepTransport
from app.engine.executor.worker_group.group import RankFailedError, WorkerGroup
from app.engine.executor.worker_group.semaphores import Inode, mapped_semaphores, unlink_semaphores
from app.engine.executor.worker_group.signals import IN_SOCKET, PARK

_BUFFER_BYTES = 1 << 20
CAPACITY_BYTES = _BUFFER_BYTES - (1 << 14)  # leaves room for what Ray adds to a payload
_WAKE = b""
_READ_TIMEOUT_S = 10.0  # after the ring the reply is there within microseconds
_TEARDOWN_TIMEOUT_S = 5.0
_DEATH_SETTLE_S = 2.0  # a graph that broke: the worker's socket closes within this time, if it died
_one_at_a_time = threading.Lock()  # graphs that are compiled in this process


def worker_environment(step_timeout_s: float) -> Mapping[str, str]:
    """Ray's settings for worker processes, which read them once when they start."""
    timeout_s = str(math.ceil(step_timeout_s) + 60)  # ours fires first
    return {
        "RAY_CGRAPH_buffer_size_bytes": str(_BUFFER_BYTES),
        "RAY_CGRAPH_get_timeout": timeout_s,
        "RAY_CGRAPH_submit_timeout": timeout_s,
        "RAY_CGRAPH_teardown_timeout": str(math.ceil(_TEARDOWN_TIMEOUT_S)),
    }


class CompiledGraphTransport(StepTransport):
    """A compiled graph for the payloads, the workers' sockets for ring, wake and oversize."""

    needs_actors = True

    def __init__(self, worker_group: WorkerGroup, max_inflight: int, step_timeout_s: float) -> None:
        super().__init__(worker_group, max_inflight, step_timeout_s)
        self._graph: Any = None
        self._read_timeout_s = min(_READ_TIMEOUT_S, step_timeout_s)
        self._outstanding: deque[list[Any]] = deque()  # per step, one result reference a rank
        # A channel to another node holds one payload: with more steps out, the driver would wait inside Ray for a
        # worker which may itself be waiting for the driver to take a large reply.
        self._far = not all(rank.same_node for rank in worker_group.ranks)
        self._gathering = False  # a shutdown may come from another thread meanwhile
        self._early: deque[list[bytes]] = deque()  # replies taken in before they were asked for
        self._parked: list[Any] | None = None  # the result references of the step in which the workers sleep
        self._woken: list[Any] = []  # those of the sleep that ended last, read with the next step's: no wait of its own
        self._semaphores: Set[Inode] = set()
        self._names_gone = False

    def start(self) -> None:
        """Compile the graph; every rank's `step` loops in it from now on."""
        context = DAGContext.get_current()  # this process has imported Ray long ago: its environment is read
        context.buffer_size_bytes = _BUFFER_BYTES
        context.get_timeout = context.submit_timeout = math.ceil(self._step_timeout_s) + 60
        context.teardown_timeout = math.ceil(_TEARDOWN_TIMEOUT_S)
        with InputNode() as step_message:
            outputs = [rank.actor.step.bind(step_message, CAPACITY_BYTES) for rank in self._worker_group.ranks]
        with _one_at_a_time:
            others = mapped_semaphores()
            self._graph = MultiOutputNode(outputs).experimental_compile(
                _submit_timeout=self._step_timeout_s,
                _max_inflight_executions=self._max_inflight + 1,  # and the step that the workers slept in
            )
            for channel in self._graph.dag_output_channels:
                channel.ensure_registered_as_reader()
            self._semaphores = mapped_semaphores() - others

    def submit(self, payload: bytes) -> None:
        """Write one step message to the graph's input; a large one goes through the sockets."""
        self._wake()
        while self._far and len(self._outstanding) >= 2:
            self._early.append(self._gather(self._step_timeout_s))
        large = len(payload) > CAPACITY_BYTES
        self._outstanding.append(self._execute(IN_SOCKET if large else payload))
        if large:
            self._worker_group.broadcast(payload, self._step_timeout_s)

    def collect(self, timeout_s: float) -> list[bytes]:
        """Sleep until all ranks have rung, then read the graph's outputs."""
        return self._early.popleft() if self._early else self._gather(timeout_s)

    def _gather(self, timeout_s: float) -> list[bytes]:
        self._gathering = True
        try:
            rings = self._worker_group.gather(timeout_s)
        finally:
            self._gathering = False
        if self._woken:
            self._read(self._woken)
            self._woken = []
        replies = self._read(self._outstanding.popleft())
        if not self._names_gone:
            self._unlink_names()
        return [ring if reply == IN_SOCKET else reply for ring, reply in zip(rings, replies, strict=True)]

    def park(self) -> None:
        """Give the workers a step that sleeps on the socket."""
        assert not self._outstanding, f"park with {len(self._outstanding)} steps outstanding"
        if self._parked is None:
            self._parked = self._execute(PARK)

    def close(self, healthy: bool) -> None:
        """Let the workers out of the graph, and leave no name of it."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        if healthy and not self._gathering:
            self._drain()
        self._tear_down(graph)
        unlink_semaphores(self._semaphores)  # if its first step failed

    def _drain(self) -> None:
        """Take in what is out, for a bounded time: an answer of another node that came into a graph which is torn down
        would end Ray's own process on this node."""
        deadline = time.monotonic() + _TEARDOWN_TIMEOUT_S
        with contextlib.suppress(RankFailedError):
            self._wake()
            while self._outstanding:
                self._gather(max(0.0, deadline - time.monotonic()))
            self._read(self._woken)

    def _unlink_names(self) -> None:
        """Every rank has answered, so all have opened all of their semaphores.

        What this process shares with ranks and Ray's own processes is of this node; the others' nodes are theirs.
        """
        self._names_gone = True
        unlink_semaphores(self._semaphores)
        for rank in self._worker_group.ranks:
            if not rank.same_node:
                rank.actor.unlink_semaphores.remote()  # beside the graph's loop; nobody needs to wait for it

    def _tear_down(self, graph: Any) -> None:
        """Aside and for a bounded time: Ray's teardown may wait for a worker for ever."""
        references = [self._parked, self._woken, *self._outstanding]

        def tear_down() -> None:
            graph.teardown()
            references.clear()  # not before: a reference dropped unread waits for its result

        thread = threading.Thread(target=tear_down, name="graph-teardown", daemon=True)
        thread.start()
        thread.join(2 * _TEARDOWN_TIMEOUT_S)

    def _wake(self) -> None:
        if self._parked is not None:
            self._worker_group.broadcast(_WAKE, self._step_timeout_s)
            self._woken, self._parked = self._parked, None

    def _execute(self, payload: bytes) -> list[Any]:
        try:
            references: list[Any] = self._graph.execute(payload)
        except Exception as error:  # whatever Ray makes of a broken channel
            raise self._failure(error) from error
        return references

    def _read(self, references: list[Any]) -> list[bytes]:
        replies: list[bytes] = []
        try:
            for reference in references:
                replies.append(reference.get(self._read_timeout_s))
            return replies
        except RayChannelTimeoutError as error:  # it was stopped between its ring and its reply
            rank = self._worker_group.ranks[len(replies)]
            reason = f"did not answer within {self._read_timeout_s:g} s of its ring: it hangs"
            raise RankFailedError(rank, reason, hangs=True) from error
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> RankFailedError:
        """Find the rank whose death broke the graph; the first one when all are still there."""
        deadline = time.monotonic() + _DEATH_SETTLE_S
        while time.monotonic() < deadline:
            try:
                self._worker_group.check()
            except RankFailedError as death:
                return death
            time.sleep(0.01)
        return RankFailedError(self._worker_group.ranks[0], f"or its graph failed: {type(error).__name__}: {error}")
