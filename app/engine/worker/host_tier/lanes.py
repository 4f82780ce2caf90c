"""Queues of device work that run beside each other, and marks by which one waits for another.

On a GPU a lane is a CUDA stream and a mark an event. The few operations are a protocol, so that what orders copies
(kv_transfer.py) is tested on a CPU against lanes that run their work as late, and as much out of step, as they may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a lane."""

    def is_done(self) -> bool:
        """Whether all work before it has been done."""


class Lane(Protocol):
    """Work is done in the order in which it was given."""

    def run(self, work: Callable[[], None]) -> None:
        """Give it work."""

    def mark(self) -> Mark:
        """The point after all work given so far."""

    def wait(self, mark: Mark) -> None:
        """Work given from now on is done after `mark`, of whatever lane."""


class CudaMark:
    """An event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def is_done(self) -> bool:
        """Whether the device has passed it."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaLane:
    """A stream of its own, or (`current`) the one in which steps run, whichever that is."""

    def __init__(self, device: torch.device, *, current: bool = False) -> None:
        self._device = device
        self._own = None if current else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._own or torch.cuda.current_stream(self._device)

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue what `work` launches."""
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> CudaMark:
        """Record an event."""
        return CudaMark(self._stream)

    def wait(self, mark: Mark) -> None:
        """Make the stream wait; the host does not."""
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)
