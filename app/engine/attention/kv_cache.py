"""The paged KV cache on the device: one tensor [B, 2, Hkv, S, D] for each attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.engine.layers.attention import Attention


@dataclass(slots=True, frozen=True)
class KVCacheSpec:
    """Shape of the cache on this rank; the number of blocks is decided later."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, layers: list[Attention], block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        """The cache that these layers need."""
        return cls(len(layers), layers[0].num_kv_heads, layers[0].head_dim, block_size, dtype)

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
        """Zeroed, so that slots nobody wrote are finite when a masked product touches them."""
        shape = (num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(self.num_layers)]
