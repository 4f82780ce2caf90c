"""Queues of device work that run beside each other, and marks by which one waits for another.

On a GPU they are its streams and events. The few operations are a protocol, so that what orders copies
(kv_transfer.py) is tested on a CPU against streams that run their work as late, and as much out of step, as they may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from app.platforms import platform_of


class Event(Protocol):
    """A point in a stream."""

    def is_done(self) -> bool:
        """True if all work before it has been done."""


class Stream(Protocol):
    """Work is done in the order in which it was given."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue work."""

    def record_event(self) -> Event:
        """An event after all work enqueued so far."""

    def wait(self, event: Event) -> None:
        """Work given from now on is done after `event`, of whatever stream."""


class DeviceEvent:
    """An event of the device's."""

    def __init__(self, event: torch.Event, stream: torch.Stream) -> None:
        self.event = event
        self.event.record(stream)

    def is_done(self) -> bool:
        """True if the device has passed it."""
        return bool(self.event.query())


class DeviceStream:
    """A stream of its own, or (`current`) the one in which steps run, whichever that is."""

    def __init__(self, device: torch.device, *, current: bool = False) -> None:
        self._device = device
        self._runtime = platform_of(device).runtime
        self._own: torch.Stream | None = None if current else self._runtime.Stream(device)

    @property
    def _stream(self) -> torch.Stream:
        return self._own or self._runtime.current_stream(self._device)

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue what `work` launches."""
        with self._runtime.stream(self._stream):
            work()

    def record_event(self) -> DeviceEvent:
        """Record an event."""
        return DeviceEvent(self._runtime.Event(), self._stream)

    def wait(self, event: Event) -> None:
        """Make the stream wait; the host does not."""
        assert isinstance(event, DeviceEvent)
        self._stream.wait_event(event.event)
