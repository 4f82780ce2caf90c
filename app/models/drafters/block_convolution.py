"""Convolutions within blocks of drafts, and the layer that has them (DFlash 2, 2026): a place reads those before it."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import nn

from app.kernels.gemm import Activations, materialize
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import PLAIN
from app.layers.norm import Norm
from app.layers.replicated import ReplicatedLinear
from app.layers.weight import REPLICATED, Weight
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_layers.base import DecoderLayer
from app.models.decoder_settings import DecoderSettings


class BlockConvolution(nn.Module):
    """Two convolutions over the places of a block, one before a part of a layer and one behind it. What each place
    weighs itself and those before it by is a base of each channel and what the place adds for a group of channels."""

    def __init__(self, ctx: BuildContext, size: int, taps: int, group: int) -> None:
        """`group` channels are weighed alike; they divide `size`."""
        super().__init__()
        self.taps, self._groups = taps, size // group
        self.base_kernel = Weight(torch.empty(2, taps, size, dtype=ctx.dtype), REPLICATED)
        self.kernel_projection = ReplicatedLinear(ctx, size, 2 * taps * self._groups, bias=False)

    def before(self, x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, C] of blocks of `width` places -> (what the part reads [T, C], the weights for `behind`)."""
        added = self.kernel_projection(x).view(-1, width, 2, self.taps, self._groups, 1)
        return self._convolved(x, added[:, :, 0], 0, width), added[:, :, 1]

    def behind(self, y: torch.Tensor, added: torch.Tensor, width: int) -> torch.Tensor:
        """y [T, C], what the part gave -> [T, C]."""
        return self._convolved(y, added, 1, width)

    def _convolved(self, x: torch.Tensor, added: torch.Tensor, side: int, width: int) -> torch.Tensor:
        places = x.view(-1, width, self._groups, x.shape[-1] // self._groups)
        weights = added + self.base_kernel[side].view(self.taps, *places.shape[2:])  # [N, width, taps, groups, group]
        out = weights[:, :, 0] * places
        for back in range(1, min(self.taps, width)):
            out[:, back:] += weights[:, back:, back] * places[:, :-back]
        return out.view_as(x)


class ConvolvedLayer(DecoderLayer):
    """Llama's layer with convolutions around its attention and its feed-forward layer."""

    norms = MappingProxyType({"input_layernorm": False, "post_attention_layernorm": False})
    post_attention_layernorm: Norm

    def __init__(
        self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks, taps: int, group: int
    ) -> None:
        """`taps`, `group`: of its convolutions."""
        super().__init__(ctx, settings, place, blocks)
        size = settings.hidden_size
        self.attention_conv, self.mlp_conv = (BlockConvolution(ctx, size, taps, group) for _ in range(2))

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext, width: int = 1
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward; the tokens are those of blocks of `width` places."""
        read, added = self.attention_conv.before(materialize(normed), width)
        made = self.attention_conv.behind(self.self_attn(read, PLAIN, ctx), added, width)
        normed, x = self.post_attention_layernorm.after_add(made, x)
        read, added = self.mlp_conv.before(materialize(normed), width)
        made = self.mlp_conv.behind(self.mlp(read, PLAIN, ctx), added, width)
        return (x + made, x + made) if next_norm is None else next_norm.after_add(made, x)
