"""Layers that encoders of pictures share: patches, attention within a picture, feed-forward blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from app.kernels.attention.encoder import EncoderPlan
from app.kernels.fused import FUSED_OPS
from app.kernels.fused.reference import rotate
from app.layers.activation import activation
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.norm import Norm
from app.layers.replicated import ReplicatedLinear
from app.layers.weight import REPLICATED, Weight


@dataclass(slots=True, frozen=True)
class Span:
    """Says which tokens see each other, and how queries and keys are rotated."""

    plan: EncoderPlan
    cos: torch.Tensor | None = None  # [T, 1, D]; None: nothing rotates
    sin: torch.Tensor | None = None  # [T, 1, D], the first half negated
    seen: torch.Tensor | None = None  # bool [T]: tokens without it are no keys; None: all are


class PatchEmbedding(Layer):
    """A convolution whose stride is its kernel: a product of each patch, flattened."""

    def __init__(self, ctx: BuildContext, size: int, patch: tuple[int, ...], bias: bool) -> None:
        """`patch`: channels, then frames where there are some, rows, columns."""
        super().__init__()
        self.weight = Weight(torch.empty(size, *patch, dtype=ctx.dtype), REPLICATED)
        self.bias = Weight(torch.empty(size, dtype=ctx.dtype), REPLICATED) if bias else None

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[T, *patch] -> [T, size]."""
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


def patches_of(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """Pictures [n, 3, H, W] -> their patches row by row, [n * H//side * W//side, 3, side, side]; pixels at the end that
    fill none are left out, as a convolution leaves them."""
    n, channels, height, width = pixels.shape
    rows, columns = height // side, width // side
    pixels = pixels[:, :, : rows * side, : columns * side]
    cut = pixels.reshape(n, channels, rows, side, columns, side)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels, side, side)


class VisionAttention(Layer):
    """Attention within spans, without a cache; queries, keys and values are three products or one."""

    def __init__(
        self,
        ctx: BuildContext,
        size: int,
        num_heads: int,
        *,
        bias: bool = True,
        output_bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, size // num_heads
        self.q_proj, self.k_proj, self.v_proj = (ReplicatedLinear(ctx, size, size, bias) for _ in range(3))
        self.o_proj = ReplicatedLinear(ctx, size, size, output_bias)

    def forward(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        query, key, value = (self._heads(y) for y in self.project(x))
        if span.cos is not None and span.sin is not None:
            query, key = rotate(query, span.cos, span.sin), rotate(key, span.cos, span.sin)
        out = span.plan.attend(query, key, value, self.head_dim**-0.5, seen=span.seen)
        return self.o_proj(out.reshape(len(out), -1))  # type: ignore[no-any-return]

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [T, H * D]."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), self.num_heads, self.head_dim)


class FusedAttention(Layer):
    """The same with one product for queries, keys and values, and one launch that rotates queries and keys."""

    def __init__(
        self, ctx: BuildContext, size: int, num_heads: int, *, bias: bool = True, output_bias: bool = True
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, size // num_heads
        self.qkv = ReplicatedLinear(ctx, size, 3 * size, bias)
        self.proj = ReplicatedLinear(ctx, size, size, output_bias)
        self._rotate_heads = ctx.kernels(FUSED_OPS).rotate_heads

    def forward(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        heads = self.qkv(x).view(len(x), 3 * self.num_heads, self.head_dim)
        turned, value = heads.split((2 * self.num_heads, self.num_heads), 1)
        if span.cos is not None and span.sin is not None:
            self._rotate_heads(turned, span.cos, span.sin, None, self.num_heads)
        query, key = turned.split(self.num_heads, 1)
        out = span.plan.attend(query, key, value, self.head_dim**-0.5)
        return self.proj(out.reshape(len(out), -1))  # type: ignore[no-any-return]


class PlainBlock(Layer):
    """down(act(up(x)))."""

    def __init__(
        self, ctx: BuildContext, size: int, inner: int, act: str, *, out: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.fc1 = ReplicatedLinear(ctx, size, inner, bias)
        self.fc2 = ReplicatedLinear(ctx, inner, out or size, bias)
        self.act = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class GatedBlock(Layer):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, ctx: BuildContext, size: int, inner: int, act: str, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (ReplicatedLinear(ctx, size, inner, bias) for _ in range(2))
        self.down_proj = ReplicatedLinear(ctx, inner, size, bias)
        self.act = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class VisionBlock(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, norms: tuple[Norm, Norm], attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn, self.mlp = attn, mlp

    def forward(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        x = x + self.attn(self.norm1(x), span)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]
