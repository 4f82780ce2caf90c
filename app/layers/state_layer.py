"""The base of layers that keep a state of each request instead of its tokens: recurrent ones and short convolutions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import ClassVar

import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.recurrent import RECURRENT_OPS, DraftRoom, StateStep
from app.layers.attention_layer import AttentionLayer
from app.layers.cache_spec import LayerStateSpec
from app.layers.context import BuildContext, ForwardContext
from app.layers.linear import MergedColumnLinear
from app.layers.side_by_side import SideBySide


class StateLayer(AttentionLayer):
    """Stands where other layers attend. It caches nothing of tokens, so windows and shared prefixes are none of its
    concern.

    What a token changes in the states follows from its projections, `in_proj`. So where drafts are verified these are
    kept, and those of the tokens that stay go through the states when that is known.
    """

    is_capturable = captures_prompts = True
    shares_prefixes = True
    in_proj: MergedColumnLinear
    recurs_through_products: ClassVar[bool] = False  # `recur` has linear layers of its own

    def __init__(self, ctx: BuildContext, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.state_dtype = ctx.state_dtype
        self.ops = ctx.kernels(RECURRENT_OPS)
        self.dtype, self.device = ctx.dtype, ctx.device
        self.drafted: torch.Tensor | None = None  # [places, W] projections of requests with drafts
        self.room: DraftRoom | None = None  # None: these are of one step

    @property
    def plan_key(self) -> Hashable:
        """All of them see the same of a step."""
        return "states"

    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        """Find the states of the step's requests."""
        meta.plan = StateStep.of(meta, self.room)

    def cache_spec(self) -> None:
        """Nothing of tokens."""
        return None

    @abstractmethod
    def state_spec(self) -> LayerStateSpec:
        """Returns what the layer keeps of each request on this rank."""

    @abstractmethod
    def recur(self, projected: SideBySide, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """Take the step's tokens through the states of all requests, a tensor [slots, ...] for each of `state_spec`:
        projections [T, W] -> what the layer's last product reads [T, ...]."""

    def make_room(self, num_places: int, room: DraftRoom | None = None) -> None:
        """Drafts will be verified, with so many places for the tokens of all requests that have any; `room`: in a stage
        that hears later which of them stay."""
        self.room = room
        width = sum(share.size for share in self.in_proj.output_shares.values())
        self.drafted = torch.zeros(num_places, width, dtype=self.dtype, device=self.device)

    def run(self, projected: SideBySide, ctx: ForwardContext) -> torch.Tensor:
        """The same as `recur` for the tokens of a step; of requests with drafts the states stay as they are."""
        step = state_step(ctx, self)
        if step.drafts is not None:
            assert self.drafted is not None, "nobody said that there would be drafts"
            tokens = step.drafts.tokens
            kept = projected.whole() if tokens is None else projected.whole().index_select(0, tokens)
            if step.drafts.places is None:
                self.drafted[: len(kept)].copy_(kept)
            else:
                self.drafted.index_copy_(0, step.drafts.places, kept)
        return self.recur(projected, ctx.states[self.layer_index], step)

    def accept(self, states: tuple[torch.Tensor, ...], accepted: StateStep) -> None:
        """Take the tokens that stay, as `DraftedRows.accepted` says of the same step, through the layer's states; or
        those that `DraftRoom.accepted` says, of rows."""
        assert self.drafted is not None
        if self.room is None:
            kept = self.drafted[: len(accepted.row_of_token)]
        else:
            kept = self.drafted.view(-1, self.room.each, self.drafted.shape[1])[accepted.slots.long()].flatten(0, 1)
        self.recur(SideBySide((kept,)), states, accepted)


def state_step(ctx: ForwardContext, layer: StateLayer) -> StateStep:
    """The step's requests as the layer's plan says."""
    step = ctx.attention[layer.layer_index].plan
    assert isinstance(step, StateStep)
    return step
