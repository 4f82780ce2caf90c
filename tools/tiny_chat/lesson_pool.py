"""Lessons on the device that workers make while a model learns, and a log with the time."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import Any

import torch

T0 = time.time()


def log(*what: Any) -> None:
    """Print with the time."""
    print(f"[{time.time() - T0:6.1f}s]", *what, flush=True)


class LessonPool:
    """The last lessons that workers made; old ones make room for new ones."""

    def __init__(self, capacity: int, parts: Sequence[tuple[tuple[int, ...], torch.dtype]], device: str) -> None:
        """`parts`: shape and type of each tensor of a lesson."""
        self.parts = [torch.zeros(capacity, *shape, dtype=dtype, device=device) for shape, dtype in parts]
        self.capacity, self.made, self.is_over = capacity, 0, False

    def fill(self, source: Any) -> None:
        """Take what comes, for good."""
        while not self.is_over:
            try:
                chunk = source.get(timeout=1)
            except queue.Empty:
                continue
            at = self.made % self.capacity
            count = min(len(chunk[0]), self.capacity - at)
            for own, new in zip(self.parts, chunk, strict=True):
                own[at : at + count] = torch.from_numpy(new[:count]).to(own.device)
            self.made += count

    def sample(self, count: int) -> list[torch.Tensor]:
        """Some of them."""
        while self.made < count:
            time.sleep(0.02)
        at = torch.randint(0, min(self.made, self.capacity), (count,), device=self.parts[0].device)
        return [part[at] for part in self.parts]
