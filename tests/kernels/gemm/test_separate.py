"""Products of packed weights and what follows them, against plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.kernels.gemm import DeferredNorm, PackedWeight, materialize

EPS = 1e-5


class Doubled(PackedWeight):
    """A kernel that knows the product alone; its weight counts twice, so that nobody multiplies by the tensor."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, 2 * self.weight, bias)


def test_what_follows_a_product_alone() -> None:
    torch.manual_seed(0)
    x, weight, bias, residual, norm = (
        torch.randn(3, 8),
        torch.randn(6, 8),
        torch.randn(6),
        torch.randn(3, 6),
        torch.randn(6),
    )
    packed = Doubled(weight)
    truth = x @ (2 * weight.T) + bias
    torch.testing.assert_close(packed.ops.linear(x, packed, bias), truth)
    gate, up = truth.chunk(2, dim=-1)
    torch.testing.assert_close(packed.ops.gated_linear(x, packed, bias, "silu"), F.silu(gate) * up)
    normed, total = packed.ops.linear_add_norm(x, packed, bias, residual, norm, EPS, True)
    torch.testing.assert_close(total, truth + residual)
    torch.testing.assert_close(materialize(normed), F.rms_norm(truth + residual, (6,), norm, EPS))


def test_rows_of_a_deferred_norm() -> None:
    x = torch.randn(3, 8)
    deferred = DeferredNorm(x, x.square().sum(1, keepdim=True), EPS)
    packed = Doubled(torch.randn(6, 8))
    torch.testing.assert_close(
        packed.ops.linear(deferred, packed, None), F.rms_norm(x, (8,), None, EPS) @ (2 * packed.weight.T)
    )
