"""The one-pass Gumbel-argmax against the PyTorch one: in Triton's interpreter on a CPU, for real on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from app.kernels.sampling import reference, triton_ops, uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def keys_and_positions(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    keys = torch.stack([seeds, torch.arange(num_rows) % 3], dim=1)
    return keys.to(DEVICE), (torch.arange(num_rows) * 4099).to(DEVICE)


@pytest.mark.parametrize("vocab_size", [1, 3, 1003, 2500])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_draws_what_float64_draws(vocab_size: int, scale: float) -> None:
    torch.manual_seed(0)
    keys, positions = keys_and_positions(9)
    logits = torch.randn(9, vocab_size, device=DEVICE) * scale
    logits[3, vocab_size // 2 + 1 :] = float("-inf")
    sampled = triton_ops.gumbel_argmax(logits, keys, positions)
    u = uniform(keys, positions, vocab_size, 0).double().cpu().numpy()
    expected = np.argmax(logits.double().cpu().numpy() - np.log(-np.log1p(-u)), axis=1)
    np.testing.assert_array_equal(sampled.cpu().numpy(), expected)
    assert torch.equal(sampled, reference.gumbel_argmax(logits, keys, positions))


def test_purpose_and_row_stride() -> None:
    torch.manual_seed(0)
    keys, positions = keys_and_positions(6)
    logits = torch.randn(6, 700, device=DEVICE)[:, :333]
    sampled = triton_ops.gumbel_argmax(logits, keys, positions, purpose=5)
    assert torch.equal(sampled, reference.gumbel_argmax(logits.contiguous(), keys, positions, purpose=5))
    assert not torch.equal(sampled, triton_ops.gumbel_argmax(logits, keys, positions))
    assert triton_ops.gumbel_argmax(logits[:0], keys[:0], positions[:0]).shape == (0,)


@pytest.mark.gpu
def test_follows_softmax_on_the_gpu() -> None:
    num_draws, vocab_size = 200_000, 1100
    logits = (torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * 2).to(DEVICE)
    keys = torch.tensor([[7, 0]], device=DEVICE).expand(num_draws, 2)
    sampled = triton_ops.gumbel_argmax(
        logits.expand(num_draws, vocab_size), keys, torch.arange(num_draws, device=DEVICE)
    )
    expected = torch.softmax(logits.double(), 0).cpu().numpy() * num_draws
    counts = np.bincount(sampled.cpu().numpy(), minlength=vocab_size)
    common = expected >= 10
    observed = np.append(counts[common], counts[~common].sum())
    assert stats.chisquare(observed, np.append(expected[common], expected[~common].sum())).pvalue > 1e-3
