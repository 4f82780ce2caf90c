"""Fused functions that are made of a norm and a rotation, in both makings: NumPy in fp64 is the judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.kernels.attention import HeadNorm
from app.kernels.fused import FusedOps, exact, reference

EPS = 1e-5
OPS = pytest.mark.parametrize("ops", [reference.OPS, exact.OPS], ids=["reference", "exact"])


def normed(x: np.ndarray, weight: torch.Tensor) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight.double().numpy()


@OPS
@pytest.mark.parametrize("is_normed", [False, True])
def test_queries_and_keys_are_normed_by_their_own_weights_and_turned_in_place(ops: FusedOps, is_normed: bool) -> None:
    torch.manual_seed(0)
    heads, weights, angles = torch.randn(7, 5, 8), torch.rand(2, 8) + 0.5, torch.rand(7, 1, 3)
    before = heads.double().numpy().copy()
    if is_normed:
        before = np.concatenate([normed(before[:, :3], weights[0]), normed(before[:, 3:], weights[1])], 1)
    cos, sin = angles.cos(), angles.sin()  # of pairs (i, i + 3) of the first six numbers
    first, second = before[..., :3], before[..., 3:6]
    c, s = cos.double().numpy(), sin.double().numpy()
    expected = np.concatenate([first * c - second * s, second * c + first * s, before[..., 6:]], -1)
    norm = HeadNorm(weights[0], weights[1], EPS) if is_normed else None
    ops.rotate_heads(heads, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), norm, 3)
    np.testing.assert_allclose(heads.numpy(), expected, atol=1e-5)


@OPS
@pytest.mark.parametrize("is_normed_first", [False, True])
@pytest.mark.parametrize("is_normed_behind", [False, True])
def test_what_is_added_is_normed_where_there_are_weights(
    ops: FusedOps, is_normed_first: bool, is_normed_behind: bool
) -> None:
    torch.manual_seed(1)
    x, residual, before, behind = torch.randn(4, 16), torch.randn(4, 16), torch.rand(16), torch.rand(16)
    added = x.double().numpy()
    total = (normed(added, before) if is_normed_first else added) + residual.double().numpy()
    expected = normed(total, behind) if is_normed_behind else total
    found = ops.add_rms_norm(
        x, residual, behind if is_normed_behind else None, EPS, before if is_normed_first else None
    )
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(found[1].numpy(), total, atol=1e-5)
