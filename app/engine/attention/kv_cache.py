"""The paged KV cache on the device: one tensor [B, 2, Hkv, S, D] for each attention layer, in the model's type or in
fp8."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.engine.layers.attention import Attention
from app.errors import ConfigError
from app.kernels.attention import KV_FP8

_FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)


def select_kv_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The type that `kv_cache_dtype` asks for; None: the model's own. ConfigError where the device lacks it."""
    if name == "auto":
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        gpu = torch.cuda.get_device_name(device)
        raise ConfigError(f"kv_cache_dtype={name}: {gpu} has no fp8; use auto", param="kv_cache_dtype")
    return KV_FP8


def describe_scales(layers: list[Attention]) -> list[str]:
    """A line for the start-up notes where the cache is quantized."""
    scales = [layer.kv_scales for layer in layers if layer.kv_scales is not None]
    if not scales:
        return []
    given = sum(bool((scale != 1).any()) for scale in scales)
    if not given:
        return ["KV cache scales: 1 (the checkpoint brings no others)"]
    return [f"KV cache scales: from the checkpoint, in {given} of {len(scales)} layers"]


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
        """The cache that these layers need: none without layers."""
        if not layers:
            return cls(0, 0, 0, block_size, dtype)
        return cls(len(layers), layers[0].num_kv_heads, layers[0].head_dim, block_size, dtype)

    @property
    def copy_dtype(self) -> torch.dtype:
        """For copies of whole blocks: a type of any meaning that PyTorch indexes on every device."""
        return torch.int16 if self.dtype == KV_FP8 else self.dtype

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
        """Zeroed, so that slots nobody wrote are finite when a masked product touches them."""
        shape = (num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(self.num_layers)]


class KVCache:
    """The cache of this rank's layers. `tensors` is one list for good: whoever holds it sees a new allocation."""

    def __init__(self, spec: KVCacheSpec, device: torch.device) -> None:
        self.spec = spec
        self.tensors: list[torch.Tensor] = []
        self._device = device

    def allocate(self, num_blocks: int) -> None:
        """Exchange what there is for so many blocks; ConfigError when the device does not have the memory."""
        self.tensors.clear()
        try:
            self.tensors.extend(self.spec.allocate(num_blocks, self._device))
        except RuntimeError as error:  # also torch.OutOfMemoryError
            mib = num_blocks * self.spec.bytes_per_block >> 20
            raise ConfigError(
                f"num_blocks={num_blocks} needs {mib} MiB on {self._device}: {error}", param="num_blocks"
            ) from error
