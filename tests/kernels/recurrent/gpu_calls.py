"""Calls of recurrences' kernels, as models' layers make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from app.kernels.recurrent import DeltaGates, DeltaHeads, GatedNorm, ScanInputs, SpaceInputs, StateStep
from app.kernels.recurrent import triton_ops as recurrent_ops
from tests.kernels.stub_gpu import as_on
from tests.kernels.target_gpu import IS_AMD


def state_steps() -> list[StateStep]:
    """A mixed step of 32 tokens, one of one each, one of several each, and one in which some of these stay."""
    steps = []
    for num_short, short_len in ((2, 1), (32, 1), (8, 4)):
        rows = torch.zeros(max(num_short, 3), dtype=torch.int32)
        chunks = torch.zeros(0 if num_short > 2 else 1, 2, dtype=torch.int32)
        of_token = torch.zeros(32, dtype=torch.int32)
        steps.append(StateStep(rows.new_zeros(len(rows) + 1), rows, rows, of_token, num_short, short_len, chunks))
    return [*steps, replace(steps[-1], counts=torch.ones(8, dtype=torch.int32))]


def delta_net(dtype: torch.dtype, heads: DeltaHeads) -> None:
    """A gated delta net and its convolution."""
    x = torch.zeros(32, sum(heads.widths), dtype=dtype)
    ones, gates = torch.zeros(heads.num_values), x[:, : heads.num_values]
    states = torch.zeros(1, heads.num_values, heads.value_dim, heads.key_dim)
    for step in state_steps():
        recurrent_ops.causal_conv(x, torch.zeros(x.shape[1], 4, dtype=dtype), None, x[None, :3], step, activate=True)
        norm = GatedNorm(x[:, : heads.widths[2]], x[0, : heads.value_dim], 1e-6)
        for generation in (0, 0 if IS_AMD else 9):
            with as_on(generation):
                recurrent_ops.gated_delta(x, heads, DeltaGates(gates, gates, ones, ones), norm, states, step)


def state_spaces(dtype: torch.dtype, sizes: tuple[int, int, int, int], channels: int) -> None:
    """Mamba 2 of H heads of P, G groups of N, and Mamba 1 of so many channels."""
    h, p, g, n = sizes
    x, b, numbers = torch.zeros(32, h * p, dtype=dtype), torch.zeros(32, g, n, dtype=dtype), torch.zeros(h)
    inputs = SpaceInputs(x.unflatten(1, (h, p)), b, b, x[:, :h], numbers, numbers, numbers)
    y, of_channel = torch.zeros(32, channels, dtype=dtype), torch.zeros(channels)
    scanned = ScanInputs(y, y[:, :16], y[:, :16], y, torch.zeros(channels, 16), of_channel, of_channel)
    for step in state_steps():
        recurrent_ops.causal_conv(x, x[0, :, None].expand(-1, 3).contiguous(), x[0], x[None, :2], step, activate=False)
        recurrent_ops.state_space(inputs, torch.zeros(1, h, p, n), step)
        recurrent_ops.gated_norm(x.unflatten(1, (g, -1)), GatedNorm(x, x[0], 1e-5, norms_first=False))
        recurrent_ops.selective_scan(scanned, torch.zeros(1, channels, 16), step)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    return [
        partial(delta_net, torch.bfloat16, DeltaHeads(16, 32, 128, 128)),
        partial(delta_net, torch.float32, DeltaHeads(2, 4, 24, 40)),
        partial(delta_net, torch.float32, DeltaHeads(16, 32, 128, 128)),
        partial(state_spaces, torch.bfloat16, (128, 64, 8, 128), 8192),
        partial(state_spaces, torch.float32, (6, 24, 2, 16), 40),
        partial(state_spaces, torch.float32, (128, 64, 8, 128), 8192),
    ]
