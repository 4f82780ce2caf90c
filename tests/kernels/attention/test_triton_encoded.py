"""Attention of single tokens to an encoder's output against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from app.kernels.attention import EncodedStep
from app.kernels.attention.triton_encoded import EncodedScratch, attend_encoded, encoded_kernel_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16


def judged(query: torch.Tensor, cache: torch.Tensor, step: EncodedStep, scale: float) -> torch.Tensor:
    """Each token by itself, in float64."""
    each, rows = -(-step.num_positions // BLOCK), []
    for i, (slot, length) in enumerate(zip(step.slots.tolist(), step.lengths.tolist(), strict=True)):
        own = cache[slot * each : (slot + 1) * each].double()
        key, value = own.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
        rows.append(F.scaled_dot_product_attention(query[i, :, None].double(), key, value, scale=scale)[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "num_positions", "lengths"),
    [(3, 64, 300, [300, 1, 129]), (2, 16, 32, [32]), (1, 128, 257, [257, 256, 128, 127, 3])],
)
def test_against_pytorch(
    dtype: torch.dtype, num_heads: int, head_dim: int, num_positions: int, lengths: list[int]
) -> None:
    torch.manual_seed(head_dim)
    count, each = len(lengths), -(-num_positions // BLOCK)
    cache = torch.randn((count + 1) * each, 2, num_heads, BLOCK, head_dim, device=DEVICE).to(dtype)
    slots = torch.randperm(count + 1)[:count].to(DEVICE, torch.int32)
    step = EncodedStep(slots, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), num_positions)
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        for position in range(length, num_positions):  # what an input before it left there counts nothing
            cache[slot * each + position // BLOCK, :, :, position % BLOCK] = float("nan")
    query = torch.randn(count, num_heads + 1, head_dim, device=DEVICE).to(dtype)[:, :num_heads]
    bound = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}[dtype]
    for scale in (head_dim**-0.5, 0.3):  # two layers of a step
        out = attend_encoded(query, cache, step, scale)
        truth = judged(query, cache, step, scale)
        assert float((out.double() - truth).norm() / truth.norm()) < bound
    assert isinstance(step.scratch, EncodedScratch)
    assert not step.scratch.arrived.any()


def test_which_it_serves() -> None:
    assert encoded_kernel_for(64, 1500) is encoded_kernel_for(128, 4096) is attend_encoded
    assert encoded_kernel_for(80, 1500) is encoded_kernel_for(256, 1500) is encoded_kernel_for(64, 4097) is None
