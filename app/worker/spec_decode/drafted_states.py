"""Brings the states of layers up to the draft tokens that stay.

A step that verifies drafts leaves the states of their requests as they were before it (`kernels/recurrent`). Once its
tokens are sampled, and before anything else reads a state, those of the tokens that are no wrong drafts go through it.
Earlier stages of a pipeline hear of it later, and compute steps of other requests until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from app.kernels.recurrent import DraftRoom, StateStep
from app.layers.context import ForwardContext
from app.layers.state_layer import StateLayer, state_step
from app.worker.attention.kv_cache import KVCache

Within = Callable[[StateStep], AbstractContextManager[object]]


class DraftedStates:
    """Those of all layers of a rank that keep any; at least one does."""

    def __init__(self, layers: Sequence[StateLayer], cache: KVCache, within: Within, num_places: int) -> None:
        """`num_places`: for the tokens of all requests with drafts; made before the KV cache is sized, so that the
        memory is counted. `within`: see ForwardPass.within_states."""
        self._layers, self._cache, self._within = layers, cache, within
        for layer in layers:
            layer.make_room(num_places)

    def accept(self, ctx: ForwardContext, num_new: torch.Tensor) -> None:
        """The step's requests with drafts have got so many tokens int64 [D]: as many of those that they brought stay.
        A step over static tensors may have more requests than these, behind them."""
        drafts = state_step(ctx, self._layers[0]).drafts
        assert drafts is not None, "a step without drafts has written its states"
        _take_through(self._layers, self._cache, self._within, drafts.accepted(num_new))


class RelayedStates:
    """The same of a stage before the last one."""

    def __init__(self, layers: Sequence[StateLayer], cache: KVCache, within: Within, room: DraftRoom) -> None:
        self._layers, self._cache, self._within, self._room = layers, cache, within, room
        for layer in layers:
            layer.make_room(room.num_places, room)

    def accept(self, rows: torch.Tensor, num_new: torch.Tensor) -> None:
        """Rows int64 [D] have got so many tokens int64 [D] in the last step with drafts that each was in."""
        _take_through(self._layers, self._cache, self._within, self._room.accepted(rows, num_new))


def _take_through(layers: Sequence[StateLayer], cache: KVCache, within: Within, accepted: StateStep) -> None:
    """Features add to products on the way what they add in steps."""
    has_products = any(layer.recurs_through_products for layer in layers)
    with within(accepted) if has_products else nullcontext():
        for layer in layers:
            layer.accept(cache.states[layer.layer_index], accepted)
