"""Elementary functions and sums made of operations that IEEE 754 rounds in one way only: a number's bits depend on its
own inputs alone, not on the shape around it, the threads that share the work, or how a library vectorises its loop.

PyTorch's own `exp` on a CPU, say, takes another code for the last few numbers of a tensor than for the others, and a
sum another order for one row than for many. Here every step is a multiplication, an addition, a division or a choice,
each rounded before the next (never fused into one), and sums are trees of a fixed shape.
"""

from __future__ import annotations

import torch

_LOG2_E = 1.4426950408889634
# 2^f for f in [-0.5, 0.5] is 1 + f * (these, the highest power first): Cephes' exp2f (Moshier), within 2 ulp.
_EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
)
_LEAST_EXPONENT, _MOST_EXPONENT = -150.0, 128.0  # 2^-150 rounds to 0, 2^128 to infinity
_HASTINGS = 0.3275911 / 1.4142135623730951  # of |x|
# The highest power of t = 1 / (1 + _HASTINGS |x|) first.
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_GELU_TANH = (0.7978845608028654, 0.044715)  # sqrt(2 / pi), and the factor of x cubed


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sums of fp32 x [..., n] over the last dimension, [...]: halves are added until one number is left, as if zeros
    filled it up to a power of two."""
    while (size := x.shape[-1]) > 1:
        half = 1 << ((size - 1).bit_length() - 1)
        head, tail = x[..., :half], x[..., half:]
        if size == 2 * half:
            x = head + tail
        else:
            x = torch.cat((head[..., : size - half] + tail, head[..., size - half :]), dim=-1)
    return x.squeeze(-1)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x of fp32 x, within a few ulp near 0 and |x| ulp further out; of -inf it is 0, of 0 exactly 1."""
    fraction = (x * _LOG2_E).clamp_(_LEAST_EXPONENT, _MOST_EXPONENT)
    whole = fraction.round()
    fraction.sub_(whole)  # exact
    result = fraction * _EXP2[0]
    for coefficient in _EXP2[1:]:
        result.add_(coefficient).mul_(fraction)
    result.add_(1.0)
    exponent = whole.to(torch.int32)
    half = exponent >> 1  # in two factors, as 2^-150 is no number of fp32
    result.mul_(_power_of_two(half))
    return result.mul_(_power_of_two(exponent.sub_(half)))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as fp32, of int32 exponents within -126 and 127: their bits."""
    return ((exponent + 127) << 23).view(torch.float32)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x) of fp32 x."""
    return 1.0 / exp(-x).add_(1.0)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """tanh of fp32 x, within 2^-23 of it: 2 sigmoid(2 x) - 1."""
    return sigmoid(x * 2.0).mul_(2.0).sub_(1.0)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(x) of fp32 x."""
    return x / exp(-x).add_(1.0)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its approximation with tanh, of fp32 x: as 1 + tanh(u) is 2 sigmoid(2 u), x sigmoid(2 u)."""
    root, cubic = _GELU_TANH
    inner = (x * x * x).mul_(cubic).add_(x).mul_(-2.0 * root)
    return x / exp(inner).add_(1.0)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU of fp32 x, x (1 + erf(x / sqrt(2))) / 2, within 1e-6: erf by a polynomial (Hastings' in Abramowitz and
    Stegun, 7.1.26) times e^(-x^2 / 2)."""
    distance = x.abs()
    t = 1.0 / (distance * _HASTINGS).add_(1.0)
    tail = t * _ERF[0]
    for coefficient in _ERF[1:]:
        tail.add_(coefficient).mul_(t)
    tail.mul_(0.5).mul_(exp((x * x).mul_(-0.5))).mul_(distance)
    return x.relu().sub_(tail)


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x) of positive fp32 x: Newton's steps in fp64 from a guess at the bits (Lomont, "Fast Inverse Square
    Root", 2003), since not even the square roots of libraries are all rounded as IEEE 754 says."""
    guess = (0x5F3759DF - (x.contiguous().view(torch.int32) >> 1)).view(torch.float32).double()
    half = x.double().mul_(0.5)
    for _ in range(4):
        guess = guess * (1.5 - half * guess * guess)
    return guess.float()


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax of fp32 x over the last dimension."""
    powers = exp(x - x.amax(dim=-1, keepdim=True))
    return powers / tree_sum(powers).unsqueeze(-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in fp32 and rounded once to the type of x."""
    wide = x.float()
    mean = tree_sum(wide * wide).unsqueeze(-1) / x.shape[-1]
    normed = wide * rsqrt(mean.add_(eps))
    return (normed if weight is None else normed * weight.float()).to(x.dtype)
