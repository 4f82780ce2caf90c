"""Random ids of Ray's in processes that are copies of one that has imported it.

Ray draws its ids (objects, placement groups, tasks, workers) by `FillRandom` (src/ray/util/random.h), from a generator
of Abseil's for each thread. A thread's generator is seeded where it is first drawn from, by a pool that the whole
process has; the pool is seeded once, by the system, where the first generator wants a seed. A fork copies both: in
copies of a process that has drawn but one id, in whichever thread, even new threads get the same seeds, and draw the
same ids as those of other copies. In copies of one that has drawn none, each seeds a pool of its own.

Imports draw: for each actor class that a module defines Ray draws an id, which nothing reads (`ray.actor`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PROBES = 2


@contextmanager
def undrawn() -> Iterator[None]:
    """Within, classes of actors that modules define have their ids from the system."""
    try:
        from ray import actor
    except ImportError:
        yield
        return
    of_class = actor.ActorClassID

    class FromSystem:
        """In its place."""

        @staticmethod
        def from_random() -> Any:
            """An id."""
            return of_class(os.urandom(of_class.size()))

    actor.ActorClassID = FromSystem
    try:
        yield
    finally:
        actor.ActorClassID = of_class


def are_apart() -> bool:
    """True if copies of this process draw ids of their own: two are made that draw one each, and the ids differ only
    where neither a generator nor the pool has been seeded. False, too, where an id cannot be had."""
    if "ray" not in sys.modules:
        return False
    drawn = [_drawn_by_a_copy() for _ in range(_PROBES)]
    return b"" not in drawn and len(set(drawn)) == _PROBES


def _drawn_by_a_copy() -> bytes:
    from ray import ObjectRef

    read, write = os.pipe()
    with open(read, "rb") as answer, open(write, "wb") as told:
        if (number := os.fork()) == 0:
            with suppress(Exception):  # no id: nothing is told
                os.write(write, ObjectRef.from_random().binary())
            os._exit(0)
        told.close()
        found = answer.read()
    with suppress(ChildProcessError):  # where the system waits for children
        os.waitpid(number, 0)
    return found
