"""Keys and values in int8: the largest number of a token's vector becomes 127 steps, and the size of a step (fp32) lies
behind the vector in the cache, in four numbers of its own. So whatever moves blocks moves the scales, too."""

from __future__ import annotations

import torch

from app.kernels.attention import KV_INT8, SCALE_WIDTH

_LARGEST = 127.0
_LEAST_SCALE = 1e-30  # that of zeros


def pack(x: torch.Tensor) -> torch.Tensor:
    """Vectors [..., D] -> int8 [..., D + SCALE_WIDTH]. One that holds NaN stays NaN."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / _LARGEST).clamp_(min=_LEAST_SCALE)
    numbers = (x / scale).round_().nan_to_num_().to(KV_INT8)
    return torch.cat((numbers, scale.view(KV_INT8)), dim=-1)


def unpack(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int8 [..., D + SCALE_WIDTH] -> vectors [..., D] of `dtype`."""
    # A product of both types would make another copy.
    return stored[..., :-SCALE_WIDTH].float().mul_(_scales(stored)).to(dtype)


def _scales(stored: torch.Tensor) -> torch.Tensor:
    """fp32 [..., 1]; where they lie, if that is at multiples of their size."""
    places = stored.shape[-1], stored.storage_offset(), *stored.stride()[:-1]
    if all(place % SCALE_WIDTH == 0 for place in places):
        return stored.view(torch.float32)[..., -1:]
    return stored[..., -SCALE_WIDTH:].contiguous().view(torch.float32)
