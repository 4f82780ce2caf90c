"""CPU work beside an event loop: bounded threads, a bounded queue, round-robin over tenants.

Tokenising, templates, JSON, logprobs: whatever a client's input makes expensive is estimated in seconds and handed to
`RequestWork.run`. Little work runs at once where it stands; the rest waits its turn in a WorkPool. Tenants take turns,
so one that queues much delays itself (fair queueing: Nagle, RFC 970); long work leaves one thread to short work; a
client that leaves takes its work out of the queue.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive

from app.api.http.errors import ClientDisconnected
from app.api.http.held_bytes import Holding, holding_of, uncounted
from app.errors import OverloadedError
from app.turns import TenantTurns

P = ParamSpec("P")
T = TypeVar("T")

# What work costs, in seconds of one core of no particular make; only the order of magnitude matters.
TOKENISE_S_PER_CHAR = 5e-7  # templates cost less
DECODE_S_PER_TOKEN = 5e-7
ECHO_S_PER_TOKEN = 1e-6
PARSE_S_PER_BYTE = 1e-8
WRITE_S_PER_LOGPROB = 2e-6

NODE_CHARS = 16  # a number, a name's own overhead, an empty list: as much work as so many characters
ENOUGH_CHARS = 1 << 17  # what is larger than that is large, and not measured further

INLINE_S = 2e-3  # what an event loop may do itself
TRY_AGAIN_S = 0.5  # whether a full pool has room by now
LONG_S = 0.05  # from here on, work is long: one thread is kept free of it
# After so long a thread gives the interpreter to another that waits; Python's own 5 ms would hold the event loop up as
# long at each of the dozens of turns that a request takes there.
SWITCH_S = 1e-3


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Job:
    tenant: str
    rank: int
    is_long: bool
    call: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    cost: float = 1.0  # tenants take turns, however long each piece of their work is
    is_waiting: bool = True


class WorkPool:
    """Threads for the work of many tenants. May be called from any thread; threads start when they are needed.

    At most `max_waiting` pieces of work wait, and `max_waiting_per_tenant` of one tenant. `num_threads` 0 means as many
    as there are cores, from 2 to 8.
    """

    def __init__(self, num_threads: int = 0, max_waiting: int = 4096, max_waiting_per_tenant: int = 2048) -> None:
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        self._num_threads = num_threads or min(8, max(2, os.cpu_count() or 1))
        self._max_waiting = max_waiting
        self._max_waiting_per_tenant = max_waiting_per_tenant
        self._executor = ThreadPoolExecutor(self._num_threads, "work")
        self._lock = threading.Lock()
        self._short, self._long = TenantTurns[_Job](1.0), TenantTurns[_Job](1.0)
        self._ranks = count()
        self._num_waiting: dict[str, int] = {}  # by tenant; only those that have something waiting
        self._num_long = 0  # running
        self._prefers_long = False

    @property
    def num_waiting(self) -> int:
        """Pieces of work that have not begun."""
        return sum(self._num_waiting.values())

    def submit(self, tenant: str, cost_s: float, call: Callable[[], T]) -> Future[T]:
        """Run `call` in a thread when it is the tenant's turn. OverloadedError when too much waits already.

        A future that is cancelled before its work begins takes it out of the queue.
        """
        with self._lock:
            self._check_room(tenant)
            job = _Job(tenant, next(self._ranks), cost_s >= LONG_S, call)
            self._turns(job).push(job)
            self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1
        waiting = weakref.ref(job)  # the future must not hold what holds it: its result may be of megabytes
        job.future.add_done_callback(lambda future: self._forget(waiting()) if future.cancelled() else None)
        self._executor.submit(self._drain)
        return job.future

    def _check_room(self, tenant: str) -> None:
        own, total = self._num_waiting.get(tenant, 0), self.num_waiting
        if own >= self._max_waiting_per_tenant:
            raise OverloadedError(f"{own} pieces of work of this tenant wait for a thread of the server; try later")
        if total >= self._max_waiting:
            raise OverloadedError(f"{total} pieces of work wait for a thread of the server; try later")

    def _drain(self) -> None:
        """Run jobs until none may begin. One of these is queued for each job, so that none is left behind."""
        while (job := self._next()) is not None:
            try:
                _run(job)
            finally:
                with self._lock:
                    self._num_long -= job.is_long

    def _next(self) -> _Job | None:
        """The job whose turn it is; long and short ones alternate while both may begin."""
        with self._lock:
            may_long = self._long.is_waited_for and self._num_long < max(1, self._num_threads - 1)
            if not may_long and not self._short.is_waited_for:
                return None
            is_long = may_long and (self._prefers_long or not self._short.is_waited_for)
            self._prefers_long = not is_long
            turns = self._long if is_long else self._short
            job = turns.first
            assert job is not None
            turns.serve(job)
            turns.settle(job, 0.0)
            self._num_long += is_long
            self._uncount(job)
            return job

    def _forget(self, job: _Job | None) -> None:
        with self._lock:
            if job is not None and job.is_waiting:
                self._turns(job).remove(job)
                self._uncount(job)

    def _turns(self, job: _Job) -> TenantTurns[_Job]:
        return self._long if job.is_long else self._short

    def _uncount(self, job: _Job) -> None:
        job.is_waiting = False
        self._num_waiting[job.tenant] -= 1
        if not self._num_waiting[job.tenant]:
            del self._num_waiting[job.tenant]


def _run(job: _Job) -> None:
    if not job.future.set_running_or_notify_cancel():
        return
    try:
        result = job.call()
    except BaseException as error:
        job.future.set_exception(error)
    else:
        job.future.set_result(result)
    finally:
        del job  # see RequestWork._wait


class RequestWork:
    """A pool as one request uses it: under its tenant's name, and only while its client is there.

    `processes` is a second pool, for calls that hold their thread for seconds, waiting for a process of their own.
    `holding` counts the memory that the request takes.
    """

    def __init__(
        self,
        pool: WorkPool,
        tenant: str = "",
        receive: Receive | None = None,
        processes: WorkPool | None = None,
        holding: Holding | None = None,
    ) -> None:
        self._pool = pool
        self._processes = processes or pool
        self._tenant = tenant
        self._receive = receive
        self.holding = holding or uncounted()

    @property
    def tenant(self) -> str:
        """The name of the request's tenant."""
        return self._tenant

    async def run(self, cost_s: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns or raises what `call` does; off the event loop unless `cost_s`, its estimate in seconds, is small.

        Raises OverloadedError when too much waits, ClientDisconnected when nobody waits for it any more; what has
        begun by then runs to its end.
        """
        if cost_s <= INLINE_S:
            return call(*args, **kwargs)
        return await self._wait(self._pool.submit(self._tenant, cost_s, lambda: call(*args, **kwargs)))

    async def run_later(self, cost_s: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for work that nobody waits for: while too much else waits, it is tried again."""
        while True:
            try:
                return await self.run(cost_s, call, *args, **kwargs)
            except OverloadedError:
                await asyncio.sleep(TRY_AGAIN_S)

    async def run_process(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for a `call` that waits for a process."""
        return await self._wait(self._processes.submit(self._tenant, INLINE_S, lambda: call(*args, **kwargs)))

    async def run_long_process(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for a process that may take minutes: one thread is kept free of such calls."""
        return await self._wait(self._processes.submit(self._tenant, LONG_S, lambda: call(*args, **kwargs)))

    async def _wait(self, submitted: Future[T]) -> T:
        future: asyncio.Future[T] = asyncio.wrap_future(submitted)
        watcher = asyncio.ensure_future(self._client_leaves())
        both: set[asyncio.Future[Any]] = {future, watcher}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if watcher.done():  # it has taken the message that says so: nobody else will see it
                raise ClientDisconnected
            return future.result()
        finally:
            future.cancel()
            watcher.cancel()
            del future, both, submitted  # an error's traceback would hold what holds the error, and all of the request

    async def _client_leaves(self) -> None:
        """Return once the client has closed the connection."""
        if self._receive is None:
            await asyncio.Event().wait()
        else:
            while (await self._receive())["type"] != "http.disconnect":
                pass


def size_of(value: Any, enough: int = ENOUGH_CHARS) -> int:
    """Estimates the work that nested lists, objects and models of a client make: characters of all their texts, and
    something for each of their nodes; exact up to `enough`, above which counting stops."""
    found, open_values = 0, [value]
    while open_values and found <= enough:
        one = open_values.pop()
        found += NODE_CHARS
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, BaseModel):
            open_values += one.__dict__.values()
        elif isinstance(one, dict):
            open_values += one.keys()
            open_values += one.values()
        elif isinstance(one, list | tuple):
            open_values += one
    return found


def work_of(request: Request) -> RequestWork:
    """The application's pool for the work of `request`, whose body has been read."""
    found: RequestWork | None = getattr(request.state, "work", None)
    if found is None:
        state, tenant = request.app.state, getattr(request.state, "tenant", "")
        holding = holding_of(request.scope)
        found = RequestWork(state.work_pool, tenant, request.receive, state.process_pool, holding)
        request.state.work = found
    return found


def unwatched_work_of(request: Request) -> RequestWork:
    """The same where somebody else looks whether the client is there."""
    state, tenant = request.app.state, getattr(request.state, "tenant", "")
    return RequestWork(state.work_pool, tenant, None, state.process_pool, holding_of(request.scope))
