"""Python's garbage collector in a process that serves.

A collection of all generations looks at every container that the process has: 200,000 after torch and transformers
were imported, which stops all threads for 60 - 120 ms in the midst of streams. What a start has made lives as long as
the process, so it is looked at once and then set aside.
"""

from __future__ import annotations

import gc

_is_settled = False


def settle_heap() -> None:
    """At the end of a start, in a process of our own: what is there now is not looked at again."""
    global _is_settled
    _is_settled = True
    gc.collect()
    gc.freeze()


def collect_heap() -> None:
    """Free all that is unreachable, also of what was set aside: device memory hangs on cycles of a start's objects."""
    gc.unfreeze()
    gc.collect()
    if _is_settled:
        gc.freeze()
