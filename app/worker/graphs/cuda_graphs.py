"""Decode steps as CUDA graphs: one replay instead of hundreds of launches, which the host cannot issue fast enough.

A step is captured at a table of sizes, largest first, into one memory pool: graphs replayed one after another on one
stream share their temporary memory. What a graph reads and writes beyond a replay lies outside the pool, at fixed
addresses (decode_step.py).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from app.config import EngineConfig
from app.engine.worker.graphs.decode_step import DecodeStep

logger = logging.getLogger("manta.graphs")

SILENT_S = 2.0
MIB = 1 << 20
# (sizes up to, distance between them): small batches are padded little, large ones by a few percent.
SIZE_TABLE = ((4, 2), (256, 8), (512, 32), (1 << 30, 128))


def graph_sizes(config: EngineConfig) -> list[int]:
    """Batch sizes to capture, ascending; the last one holds the most rows that a step can have."""
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    if config.cuda_graph_sizes is not None:
        return sorted({min(size, most) for size in config.cuda_graph_sizes})
    sizes, size = [1], 2
    while sizes[-1] < most:
        step = next(distance for limit, distance in SIZE_TABLE if size < limit)
        sizes.append(min(size, most))
        size = size + step if size < 4 or size % step == 0 else (size // step + 1) * step
    return sizes


def cascade_sizes(sizes: list[int]) -> list[int]:
    """Those of `sizes` to capture a second time, for steps that read shared prefixes once: fewer, but not so few that
    the padding costs what the sharing saves."""
    return [
        size
        for size in sizes
        if size in (8, 16) or (size >= 32 and size % (32 if size <= 512 else 256) == 0) or size == sizes[-1] > 1
    ]


def telling_sizes(sizes: list[int]) -> list[int]:
    """Those of the ascending sizes that need all kernels of the step between them, which powers of two choose: the
    first from each power on, and the last."""
    powers = [1 << exponent for exponent in range(sizes[-1].bit_length())] if sizes else []
    return sorted({*(next(size for size in sizes if size >= power) for power in powers), *sizes[-1:]})


class CudaGraphs:
    """The captured forms of a DecodeStep. Made by `capture`; same interface as the step itself."""

    def __init__(self, step: DecodeStep, device: torch.device) -> None:
        self.step = step
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._forward: dict[int, torch.cuda.CUDAGraph] = {}
        self._cascade: dict[int, torch.cuda.CUDAGraph] = {}  # the same, with shared prefixes read once
        self._sample: dict[int, torch.cuda.CUDAGraph] = {}

    def size_for(self, num_rows: int, *, cascade: bool = False) -> int | None:
        """The smallest captured size that holds so many rows; None: no size does."""
        return self.step.size_for(num_rows, cascade=cascade)

    def forward(self, size: int, *, cascade: bool = False) -> None:
        """Replay the step up to its logits."""
        (self._cascade if cascade else self._forward)[size].replay()

    def sample(self, size: int) -> None:
        """Replay the sampling."""
        self._sample[size].replay()

    def capture(self, sizes: list[int]) -> float:
        """Capture these sizes, largest first; returns the seconds it took. The device's rows must be idle."""
        began = told = time.monotonic()
        with _no_collection():
            for done, size in enumerate(sorted(sizes, reverse=True)):
                self.step.inputs.pad_all()
                self._forward[size] = self._captured(self.step.forward, size)
                if size in self.step.cascade_sizes:
                    self._cascade[size] = self._captured(partial(self.step.forward, cascade=True), size)
                if self.step.sent is None:
                    self._sample[size] = self._captured(self.step.sample, size)
                if time.monotonic() - told > SILENT_S:
                    told = time.monotonic()
                    logger.info("CUDA graphs: %d of %d sizes, %.0f s", done + 1, len(sizes), told - began)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what the runs before the captures used on the side stream
        return time.monotonic() - began

    def release(self) -> None:
        """Give the graphs' memory back."""
        torch.cuda.synchronize(self._device)
        for graphs in (self._forward, self._cascade, self._sample):
            for graph in graphs.values():
                graph.reset()
            graphs.clear()

    def _captured(self, run: Callable[[int], None], size: int) -> torch.cuda.CUDAGraph:
        """Run once on the side stream (compiles kernels, makes library workspaces), then record."""
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run(size)
            # Only this thread's calls are checked: others may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run(size)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph


def measure(step: DecodeStep, device: torch.device) -> int:
    """Bytes that all graphs of the step will take, from a trial with the largest and the smallest sizes."""
    graphs = CudaGraphs(step, device)
    torch.cuda.empty_cache()
    free = [torch.cuda.mem_get_info(device)[0]]
    for size in (step.sizes[-1], step.sizes[0]):
        graphs.capture([size])
        free.append(torch.cuda.mem_get_info(device)[0])
    graphs.release()
    del graphs
    gc.collect()
    torch.cuda.empty_cache()
    pool, each = max(0, free[0] - free[1]), max(MIB, free[1] - free[2])
    return pool + each * (len(step.sizes) - 1 + len(step.cascade_sizes[:-1]))


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collector that frees device memory in the midst of a capture would spoil it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
