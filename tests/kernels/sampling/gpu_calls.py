"""Calls of sampling, as models make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from app.kernels.sampling import triton_ops as sampling_ops
from app.kernels.sampling import triton_sample, triton_token_masks


def sampling(dtype: torch.dtype, vocab_size: int) -> None:
    """Sampling of two rows."""
    logits, floats = torch.zeros(2, vocab_size, dtype=dtype), torch.zeros(2)
    keys, ints = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    triton_sample.sample_tokens(logits, floats, ints.int(), floats, floats, keys, ints)
    sampling_ops.gumbel_argmax(logits.float(), keys, ints)
    words = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int32)
    triton_token_masks.apply_token_masks(logits.float(), ints.int(), words)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    return [partial(sampling, torch.float32, 151_936), partial(sampling, torch.bfloat16, 128_256)]
