"""Start-up of the decode graphs: whether to have them, the memory they will take, their capture, a note on it."""

from __future__ import annotations

import logging

import torch

from app.config import EngineConfig
from app.engine.distributed.parallel_groups import RankGroup
from app.engine.worker.graphs import cuda_graphs
from app.engine.worker.graphs.cuda_graphs import CudaGraphs
from app.engine.worker.graphs.decode_step import DecodeStep
from app.engine.worker.model_runner import ModelRunner
from app.errors import ConfigError

logger = logging.getLogger("manta.graphs")


class GraphSetup:
    """Made once the model is there; `reserve` before the KV cache is sized, `capture` once it is allocated.

    Raises ConfigError where `cuda_graphs=on` and there can be none, or one of several ranks cannot capture them.
    """

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, dtype: torch.dtype, device: torch.device, tp: RankGroup
    ) -> None:
        self._config = config
        self._tp = tp
        self._runner = runner
        self._device = device
        self._step: DecodeStep | None = None
        self.note = ""
        refused = refusal(config, device)
        if refused is None:
            sizes = cuda_graphs.graph_sizes(config)
            shared = cuda_graphs.cascade_sizes(sizes) if runner.cascade is not None else []
            self._step = runner.static_step(sizes, dtype, shared)
        else:
            self._go_without(refused)

    def rehearse(self) -> None:
        """Launch what a capture will, at sizes that have all its kernels between them."""
        step = self._step
        if step is None:
            return
        for size in cuda_graphs.telling_sizes(step.sizes):
            step.inputs.pad_all(size)
            step.forward(size)
        for size in cuda_graphs.telling_sizes(step.cascade_sizes):
            step.inputs.pad_all(size)
            step.forward(size, cascade=True)
        if step.sent is None:
            step.inputs.pad_all(step.sizes[0])  # the inputs of another size would say other places
            step.sample(step.sizes[0])

    def reserve(self) -> int:
        """Bytes to keep free for the graphs."""
        if self._step is None:
            return 0
        try:
            return cuda_graphs.measure(self._step, self._device)
        except Exception as error:  # whatever a kernel or a library raises while it is captured
            self._fail(error)
            return 0

    def capture(self) -> None:
        """Capture all sizes over the KV cache as it is now; from then on the runner decodes with them."""
        if self._step is None:
            return
        try:
            graphs = CudaGraphs(self._step, self._device)
            before = torch.cuda.mem_get_info(self._device)[0]
            seconds = graphs.capture(self._step.sizes)
            mib = (before - torch.cuda.mem_get_info(self._device)[0]) >> 20
        except Exception as error:  # as above
            self._fail(error)
            return
        self._runner.decode = graphs
        sizes, shared = self._step.sizes, self._step.cascade_sizes
        extra = f" ({len(shared)} also for shared prefixes)" if shared else ""
        self.note = (
            f"CUDA graphs: {len(sizes)} batch sizes up to {sizes[-1]}{extra}, {mib} MiB, captured in {seconds:.1f} s"
        )

    def _fail(self, error: Exception) -> None:
        """Go on without graphs; not in a tensor-parallel group, whose other ranks are waiting in the sums of the step
        that failed here, where no vote reaches them."""
        logger.warning("CUDA graphs: the capture failed", exc_info=error)
        reason = f"capture failed: {type(error).__name__}: {error}"
        if self._tp.size > 1:
            raise ConfigError(f"{reason}; set cuda_graphs=off", param="cuda_graphs") from error
        self._step = None
        self._go_without(reason)

    def _go_without(self, reason: str) -> None:
        if self._config.cuda_graphs == "on":
            raise ConfigError(f"cuda_graphs=on, but {reason}; use auto", param="cuda_graphs")
        self.note = f"CUDA graphs: off ({reason})"


def refusal(config: EngineConfig, device: torch.device) -> str | None:
    """Why there are no graphs; None: there are."""
    if config.cuda_graphs == "off":
        return "as configured"
    if device.type != "cuda":
        return "no GPU"
    if config.attention_backend == "torch":
        return "attention_backend=torch plans each step on the host"
    return None
