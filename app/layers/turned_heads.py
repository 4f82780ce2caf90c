"""Queries and keys of encoders, which keep nothing: both are rotated in one launch."""

from __future__ import annotations

from typing import Any

import torch

from app.kernels.fused import FUSED_OPS
from app.kernels.fused.reference import rotate
from app.layers.context import BuildContext


class TurnedHeads:
    """Rotates the first heads of products that hold queries, keys and values side by side."""

    def __init__(self, ctx: BuildContext, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self._num_turned = num_heads + num_kv_heads
        # The launch takes queries and keys for queries, the two halves of values for keys and values. It writes into no
        # slot of the cache, whose shape says how many heads those are.
        is_even = num_kv_heads % 2 == 0
        self._rotate_and_write = FUSED_OPS.on(ctx.device).rotate_and_write if is_even else None
        self._cache = torch.empty(1, 2, num_kv_heads // 2, 1, head_dim, dtype=ctx.dtype, device=ctx.device)

    def of(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, memo: dict[object, Any] | None = None
    ) -> torch.Tensor:
        """heads [T, Hq + 2 Hkv, D], cos and sin [T, 1, Dr] -> rotated queries and keys [T, Hq + Hkv, D]. `memo`: see
        ForwardContext."""
        if self._rotate_and_write is None:
            return rotate(heads[:, : self._num_turned], cos, sin)
        slots: torch.Tensor | None = None if memo is None else memo.get(TurnedHeads)
        if slots is None:  # the same for all layers
            slots = torch.full((len(heads),), -1, dtype=torch.int64, device=heads.device)
            if memo is not None:
                memo[TurnedHeads] = slots
        return self._rotate_and_write(heads, cos, sin, None, self._cache, slots, None)
