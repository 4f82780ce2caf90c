"""Runs calls to actors and replicas outside of the context of the HTTP request that wants their answer.

Tasks inherit the context of who starts them, and with it the id of the request's own Ray task. When a client leaves,
Ray's proxy cancels that task and all calls that were made under its id; an actor that executes in order then waits for
good for a call that never comes, and answers nobody in this process any more. What is begun late (the work of a
background response, a batch) inherits the id as well, long after its request has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_running: set[asyncio.Task[Any]] = set()  # whoever started them may have gone


def start_outside(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task for `work` that belongs to no request: it goes on when its starter is cancelled."""
    task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
    _running.add(task)
    task.add_done_callback(_forget)
    return task


def _forget(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # nobody may wait for it any more
