"""Recurrent layers in Triton (`OPS`). Nothing here waits for the device: what differs from step to step is read by the
kernels, so that a decode step may be captured and replayed."""

from __future__ import annotations

from app.kernels.recurrent import RecurrentOps
from app.kernels.recurrent.triton_channel_delta import channel_delta
from app.kernels.recurrent.triton_conv import causal_conv
from app.kernels.recurrent.triton_gated_delta import gated_delta
from app.kernels.recurrent.triton_gated_norm import gated_norm
from app.kernels.recurrent.triton_state_space import selective_scan, state_space

OPS = RecurrentOps(
    causal_conv=causal_conv,
    gated_delta=gated_delta,
    channel_delta=channel_delta,
    state_space=state_space,
    selective_scan=selective_scan,
    gated_norm=gated_norm,
)
