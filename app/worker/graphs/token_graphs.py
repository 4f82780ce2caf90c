"""Steps of encoders as CUDA graphs, by how many tokens they have: one replay instead of a dozen launches a layer.

A step's tokens, their positions and the list of tiles go into tensors at fixed addresses, behind which tokens of short
texts of nobody's pad it to the next of a few sizes. What follows the model (pooling, classes) is not captured, so a
step is captured once whatever its requests ask for. Steps that bring more than tokens (second texts, tokens that are
not seen, adapters) run as they always do.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.kernels.attention import AttentionMetadata
from app.kernels.attention.encoder import EncoderPlan, TiledPlan
from app.layers.attention_layer import AttentionLayer
from app.layers.context import ForwardContext, HiddenStates
from app.layers.encoder_attention import EncoderAttention
from app.layers.one_pass_attention import OnePassAttention
from app.models.pooling_model import PoolingModel
from app.platforms import platform_of
from app.platforms.to_device import to_device
from app.registry import load_entry
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.recording import Recorder, no_collection

logger = logging.getLogger("manta.graphs")

# Larger steps keep the device busy as they are, and would be filled up with more tokens of no text.
LEAST_TOKENS, MOST_TOKENS = 256, 8192
TILE_ROWS = 64  # tokens of a tile (kernels/attention/triton_encoder.py; a test compares)


def token_sizes(budget: int) -> list[int]:
    """Tokens of the steps to capture, ascending, two for each power of 2, up to the largest step or MOST_TOKENS."""
    sizes, size, most = [], LEAST_TOKENS, min(budget, MOST_TOKENS)
    while size < most:
        sizes += [size, size + size // 2]
        size *= 2
    return [*(one for one in sizes if one < most), most]


class TokenForward(ForwardPass):
    """An encoder's forward pass, by replays where there are any."""

    _step: TokenStep | None = None
    _replays: Mapping[int, Callable[[], Any]] = MappingProxyType({})  # by tokens
    _sizes: Sequence[int] = ()

    def install(self, step: TokenStep | None, replays: Mapping[int, Callable[[], Any]]) -> None:
        """From now on steps run by these; None: as they are."""
        self._step, self._replays, self._sizes = step, replays, sorted(replays)

    def release(self) -> None:
        """See ForwardPass."""
        self.install(None, {})

    def compute(self, input_ids: torch.Tensor, ctx: ForwardContext) -> HiddenStates:
        """See ForwardPass."""
        plan, count = ctx.attention[0].plan, len(input_ids)
        if self._step is None or ctx.inputs or not isinstance(plan, TiledPlan) or count > self._sizes[-1]:
            return super().compute(input_ids, ctx)
        size = self._sizes[bisect_left(self._sizes, count)]
        if not self._step.load(input_ids, ctx.positions, plan.tiles, size):
            return super().compute(input_ids, ctx)
        self._replays[size]()
        assert self._step.hidden is not None, "a replay of what never ran"
        return HiddenStates(self._step.hidden[:count], ctx.kept)


class TokenStep:
    """The tensors that such steps read, and the steps themselves."""

    def __init__(
        self,
        forward: TokenForward,
        budget: int,
        max_num_seqs: int,
        device: torch.device,
        plan_over: Callable[[torch.Tensor], EncoderPlan],
    ) -> None:
        """`plan_over`: the plan of whatever tiles lie in a tensor."""
        self._plan_over = plan_over
        self.sizes = token_sizes(budget)
        self.hidden: torch.Tensor | None = None  # [largest size, C], of the last run
        self._forward, self._num_seqs = forward, max_num_seqs
        most = self.sizes[-1]
        self._input_ids = torch.zeros(most, dtype=torch.int32, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._tiles = torch.zeros(self._room(most), 3, dtype=torch.int32, device=device)

    def _room(self, size: int) -> int:
        """Tiles of so many tokens, at most."""
        return size // TILE_ROWS + min(size, self._num_seqs) + 1

    def load(self, input_ids: torch.Tensor, positions: torch.Tensor, tiles: torch.Tensor, size: int) -> bool:
        """A step for the next run of `size`; False: it has more tiles than there is room for."""
        count, room = len(input_ids), self._room(size)
        if len(tiles) > room:
            return False
        self._input_ids[:count].copy_(input_ids)
        self._positions[:count].copy_(positions)
        self._tiles[: len(tiles)].copy_(tiles)
        filled = self._fill(len(tiles), count, size)
        self._tiles[filled:room].zero_()
        return True

    def _fill(self, at: int, count: int, size: int) -> int:
        """Tokens `count` .. size become texts of one tile each, from tile `at` on; returns where they end."""
        firsts = np.arange(count, size, TILE_ROWS)
        tiles = np.stack((firsts, np.minimum(size - firsts, TILE_ROWS), np.zeros_like(firsts)), axis=1)
        self._tiles[at : at + len(tiles)].copy_(to_device(tiles.astype(np.int32), self._tiles.device))
        return at + len(tiles)

    def run(self, size: int) -> None:
        """Token ids and positions -> `hidden`."""
        nothing, layers = self._input_ids[:0], self._forward.model.attention_layers
        meta = AttentionMetadata(
            nothing, nothing, nothing, nothing, size, size, 0, plan=self._plan_over(self._tiles[: self._room(size)])
        )
        ctx = ForwardContext(self._positions[:size], [meta] * len(layers), self._forward.cache.tensors, None, {})
        hidden = ForwardPass.compute(self._forward, self._input_ids[:size], ctx).last
        if self.hidden is None:  # in the run before the first is recorded
            self.hidden = hidden.new_empty(len(self._input_ids), *hidden.shape[1:])
        self.hidden[:size].copy_(hidden)


class TokenGraphs:
    """Captures them at a start, and again where memory lies elsewhere."""

    step = prompt_step = prompts = None  # no static steps of rows that decode, nor of models that generate
    num_missing = 0

    def __init__(self, config: EngineConfig, forward: TokenForward, budget: int, device: torch.device) -> None:
        self._config, self._forward, self._budget, self._device = config, forward, budget, device
        self.note = ""
        self._refused = refusal(config, forward, device)
        if self._refused is not None:
            self._go_without(self._refused)

    def reserve(self) -> int:
        """Bytes to keep free: none, as an encoder has no KV cache that would take all the others."""
        return 0

    def capture(self) -> None:
        """Replays for the forward pass. Where a capture fails there are none."""
        self._forward.release()
        if self._refused is not None:
            return
        began = time.monotonic()
        try:
            plan_over = load_entry("app.kernels.attention.triton_encoder:StaticPlan")
            step = TokenStep(self._forward, self._budget, self._config.max_num_seqs, self._device, plan_over)
            recorder = Recorder(self._device)
            with no_collection():  # the largest first, so that the others find their memory in its
                graphs = {size: recorder.record(partial(step.run, size)) for size in reversed(step.sizes)}
            torch.cuda.synchronize(self._device)
        except Exception as error:  # whatever a kernel or a library raises while it is captured
            logger.warning("CUDA graphs: the capture failed", exc_info=error)
            self._go_without(f"capture failed: {type(error).__name__}: {error}")
            return
        self._forward.install(step, {size: graph.replay for size, graph in graphs.items()})
        seconds = time.monotonic() - began
        self.note = f"CUDA graphs: {len(graphs)} up to {step.sizes[-1]} tokens, captured in {seconds:.1f} s"

    def capture_next(self) -> int:
        """Nothing is left for later."""
        return 0

    def _go_without(self, reason: str) -> None:
        if self._config.cuda_graphs == "on":
            raise ConfigError(f"cuda_graphs=on, but {reason}; use auto", param="cuda_graphs")
        self.note = f"CUDA graphs: off ({reason})"


def refusal(config: EngineConfig, forward: TokenForward, device: torch.device) -> str | None:
    """Why there are no graphs; None: there are."""
    if config.cuda_graphs == "off":
        return "as configured"
    if not platform_of(device).has_graphs:
        return "no GPU"
    if config.tensor_parallel_size > 1:
        return "several ranks"
    if config.enable_lora:  # whose rows are no inputs of a step
        return "adapters"
    if forward.dtype == torch.float32:  # what follows may be given the graph's own memory
        return "fp32"
    return None


def attends_by_tiles(model: PoolingModel) -> bool:
    """True if all its layers do: they are an encoder's, or of a decoder that caches nothing, and nothing is added to
    their scores. Sparse vectors, as wide as the vocabulary, are left out."""
    layers = model.attention_layers
    return (
        bool(layers)
        and not model.saturates
        and all(isinstance(one, OnePassAttention) or _is_plain_encoder(one) for one in layers)
    )


def _is_plain_encoder(layer: AttentionLayer) -> bool:
    return isinstance(layer, EncoderAttention) and not layer.has_bias
