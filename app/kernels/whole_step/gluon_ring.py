# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Stages of the ring that the copy engine fills, let go by those who read them with plain loads, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def release(free):
    """Lets the copy engine write where plain loads have read. These may still be on their way when the threads' barrier
    is passed, which is soon enough for plain stores, not for the copy engine's: so a fence waits for them."""
    fence_async_shared()
    mbarrier.arrive(free, count=1)
