"""Records CUDA graphs into one memory pool: graphs replayed one after another on one stream share their temporary
memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Recorder:
    """A side stream to record on, and the pool of what is recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run once on the side stream (compiles kernels, makes library workspaces), then record."""
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
            # Only this thread's calls are checked: others may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph

    def pool_bytes(self) -> int:
        """Temporary memory that the graphs share."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == self._pool)


@contextmanager
def no_collection() -> Iterator[None]:
    """A collector that frees device memory in the midst of a capture would spoil it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
