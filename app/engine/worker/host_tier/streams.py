"""Queues of device work that run beside each other, and marks by which one waits for another.

On a GPU they are CUDA streams and events. The few operations are a protocol, so that what orders copies
(kv_transfer.py) is tested on a CPU against streams that run their work as late, and as much out of step, as they may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def is_done(self) -> bool:
        """Whether all work before it has been done."""


class Stream(Protocol):
    """Work is done in the order in which it was given."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue work."""

    def record_event(self) -> Event:
        """An event after all work enqueued so far."""

    def wait(self, event: Event) -> None:
        """Work given from now on is done after `event`, of whatever stream."""


class CudaEvent:
    """A CUDA event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def is_done(self) -> bool:
        """Whether the device has passed it."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
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

    def record_event(self) -> CudaEvent:
        """Record an event."""
        return CudaEvent(self._stream)

    def wait(self, event: Event) -> None:
        """Make the stream wait; the host does not."""
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)
