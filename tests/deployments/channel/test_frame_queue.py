"""Frames leave in order, also those that were queued before the end."""

from __future__ import annotations

import asyncio

from app.deployments.channel.frame_queue import FrameQueue
from tests.limits import run


def test_what_was_queued_leaves_before_the_end() -> None:
    async def main() -> None:
        queue = FrameQueue("ingress")
        queue.push(b"1")
        reader = asyncio.create_task(_read(queue))
        await asyncio.sleep(0)
        queue.push(b"2")
        await queue.wait_flushed(0.001)
        assert not reader.done()
        queue.push(b"3")
        queue.close()
        await queue.wait_flushed(60.0)
        assert await reader == [b"1", b"2", b"3"]

    run(main())


async def _read(queue: FrameQueue) -> list[bytes]:
    return [frame async for frame in queue.frames()]
