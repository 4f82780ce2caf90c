"""Start-up of the decode graphs: whether to have them, the memory they will take, their capture, a note on it."""

from __future__ import annotations

import logging

import torch

from app.config import EngineConfig
from app.engine.distributed.parallel_groups import RankGroup
from app.engine.row_feature import RowFeatures
from app.engine.worker.forward_pass import ForwardPass
from app.engine.worker.graphs import cuda_graphs
from app.engine.worker.graphs.cuda_graphs import CudaGraphs
from app.engine.worker.graphs.decode_step import Decode, DecodeStep
from app.engine.worker.row_state import RowState
from app.errors import ConfigError
from app.platforms import platform_of

logger = logging.getLogger("manta.graphs")


class GraphSetup:
    """Made once the model is there; `reserve` before the KV cache is sized, `capture` once it is allocated.

    Raises ConfigError where `cuda_graphs=on` and there can be none, or one of several ranks cannot capture them.
    """

    def __init__(
        self,
        config: EngineConfig,
        forward: ForwardPass,
        state: RowState,
        tp: RankGroup,
        features: RowFeatures,
        *,
        shares_prefixes: bool,
        drafts: bool = False,
    ) -> None:
        self._config = config
        self._tp = tp
        self._device = state.device
        self.step: DecodeStep | None = None  # None: there will be no graphs
        self.note = ""
        refused = refusal(config, state.device, is_capturable=forward.is_capturable)
        if refused is None and features.gives_inputs:
            refused = "a feature of this engine gives inputs to layers, which static tensors do not hold"
        if refused is None and drafts:
            refused = "steps that verify drafts bring several tokens a row, which static tensors do not hold"
        if refused is None:
            sizes = cuda_graphs.graph_sizes(config)
            self.step = DecodeStep(forward, state, sizes, cuda_graphs.cascade_sizes(sizes) if shares_prefixes else [])
        else:
            self._go_without(refused)

    def reserve(self) -> int:
        """Bytes to keep free for the graphs."""
        if self.step is None:
            return 0
        try:
            return cuda_graphs.measure(self.step, self._device)
        except Exception as error:  # whatever a kernel or a library raises while it is captured
            self._fail(error)
            return 0

    def capture(self) -> Decode | None:
        """All sizes captured over the KV cache as it is now, which must stay where it is; None: there are no graphs."""
        if self.step is None:
            return None
        try:
            graphs = CudaGraphs(self.step, self._device)
            before = torch.cuda.mem_get_info(self._device)[0]
            seconds = graphs.capture(self.step.sizes)
            mib = (before - torch.cuda.mem_get_info(self._device)[0]) >> 20
        except Exception as error:  # as above
            self._fail(error)
            return None
        sizes, shared = self.step.sizes, self.step.cascade_sizes
        extra = f" ({len(shared)} also for shared prefixes)" if shared else ""
        self.note = (
            f"CUDA graphs: {len(sizes)} batch sizes up to {sizes[-1]}{extra}, {mib} MiB, captured in {seconds:.1f} s"
        )
        return graphs

    def _fail(self, error: Exception) -> None:
        """Go on without graphs; not in a tensor-parallel group, whose other ranks are waiting in the sums of the step
        that failed here, where no vote reaches them."""
        logger.warning("CUDA graphs: the capture failed", exc_info=error)
        reason = f"capture failed: {type(error).__name__}: {error}"
        if self._tp.size > 1:
            raise ConfigError(f"{reason}; set cuda_graphs=off", param="cuda_graphs") from error
        self.step = None
        self._go_without(reason)

    def _go_without(self, reason: str) -> None:
        if self._config.cuda_graphs == "on":
            raise ConfigError(f"cuda_graphs=on, but {reason}; use auto", param="cuda_graphs")
        self.note = f"CUDA graphs: off ({reason})"


def refusal(config: EngineConfig, device: torch.device, *, is_capturable: bool) -> str | None:
    """Why there are no graphs; None: there are."""
    if config.cuda_graphs == "off":
        return "as configured"
    if not platform_of(device).has_graphs:
        return "no GPU"
    if not is_capturable:
        return f"attention_backend={config.attention_backend} plans each step on the host"
    return None
