"""Static steps as CUDA graphs: one replay instead of hundreds of launches, which the host cannot issue fast enough.

Steps are captured by a table of sizes for each combination of their parts, of each the largest first, into one memory
pool: graphs replayed one after another on one stream share their temporary memory. What a graph reads and writes beyond
a replay lies outside the pool, at fixed addresses (static_step.py). What a start has no time for is captured while the
engine idles; until then the next larger graph of these parts serves, or an ordinary step.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from app.config.engine import EngineConfig
from app.worker.graphs.recording import Recorder, no_collection
from app.worker.graphs.static_step import StaticStep, StepKey

logger = logging.getLogger("manta.graphs")

SILENT_S = 2.0
MIB = 1 << 20
MOST_OF_DRIVER = 64 * MIB  # that it keeps of a size's graphs
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
    """The captured forms of a StaticStep. Made by `capture`; same interface as the step itself."""

    def __init__(self, step: StaticStep, device: torch.device) -> None:
        self.step = step
        self._device = device
        self.recorder = Recorder(device)
        self._forward: dict[StepKey, torch.cuda.CUDAGraph] = {}
        self._sample: dict[StepKey, torch.cuda.CUDAGraph] = {}
        self._sizes: dict[StepKey, list[int]] = {}  # by kind, ascending, of what is captured

    @property
    def missing(self) -> list[StepKey]:
        """The steps that are not captured, the most needed first."""
        return [key for key in self.step.keys if key.size not in self._sizes.get(key.kind, ())]

    @property
    def num_captured(self) -> int:
        """Steps that are."""
        return sum(map(len, self._sizes.values()))

    def key_for(self, num_rows: int, parts: frozenset[str], drafts: int = 0) -> StepKey | None:
        """The smallest captured step that serves; None: none does."""
        return self.step.smallest(self._sizes, num_rows, parts, drafts)

    def forward(self, key: StepKey) -> None:
        """Replay the step up to its logits."""
        self._forward[self.step.forward_key(key)].replay()

    def sample(self, key: StepKey) -> None:
        """Replay the sampling."""
        self._sample[self.step.sample_key(key)].replay()

    def capture(self, keys: Sequence[StepKey]) -> float:
        """Capture these steps in their order; returns the seconds it took. No step is out. Every rank captures the
        same."""
        began = told = time.monotonic()
        with no_collection():
            for done, key in enumerate(keys):
                self._capture(key)
                if time.monotonic() - told > SILENT_S:
                    told = time.monotonic()
                    logger.info("CUDA graphs: %d of %d, %.0f s", done + 1, len(keys), told - began)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what the runs before the captures used on the side stream
        return time.monotonic() - began

    def release(self) -> None:
        """Give the graphs' memory back."""
        torch.cuda.synchronize(self._device)
        self._sizes.clear()
        for graphs in (self._forward, self._sample):
            for graph in graphs.values():
                graph.reset()
            graphs.clear()

    def _capture(self, key: StepKey) -> None:
        self.step.inputs.pad_all()
        of_forward, of_sample = self.step.forward_key(key), self.step.sample_key(key)
        if of_forward not in self._forward:
            self._forward[of_forward] = self.recorder.record(partial(self.step.forward, of_forward))
        if self.step.sent is None and of_sample not in self._sample:
            self._sample[of_sample] = self.recorder.record(partial(self.step.sample, of_sample))
        insort(self._sizes.setdefault(key.kind, []), key.size)

    def pool_bytes(self) -> int:
        """Temporary memory that the graphs share. What the driver keeps of each, some MiB, does not count: the device
        tells it only together with what other processes take."""
        return self.recorder.pool_bytes()


class Captured(Protocol):
    """Graphs of steps by their keys, as they are captured."""

    @property
    def missing(self) -> Sequence[Any]:
        """The steps that are not captured yet, each with its `kind`: of that the largest first."""

    def capture(self, keys: Sequence[Any]) -> Any:
        """Capture these."""

    def release(self) -> None:
        """Give their memory back."""

    def pool_bytes(self) -> int:
        """Temporary memory that they share."""


def measure(make: Callable[[], Captured], device: torch.device) -> int:
    """Bytes that all graphs of a step will take, from a trial with the first, which is the largest, and the last of
    its kind.

    What the driver keeps of a graph shows in the device's free memory only, which other processes change, too: so it is
    never taken to be more than MOST_OF_DRIVER a size.
    """
    graphs = make()
    torch.cuda.empty_cache()
    free, pools = [torch.cuda.mem_get_info(device)[0]], []
    first, *others = graphs.missing
    last = [key for key in others if key.kind == first.kind][-1:] or [first]
    for key in (first, *last):
        graphs.capture([key])
        free.append(torch.cuda.mem_get_info(device)[0])
        pools.append(graphs.pool_bytes())
    graphs.release()
    del graphs
    gc.collect()
    torch.cuda.empty_cache()
    grown = pools[1] - pools[0]
    largest, each = max(0, free[0] - free[1]), max(MIB, min(free[1] - free[2], grown + MOST_OF_DRIVER))
    return largest + each * len(others)
