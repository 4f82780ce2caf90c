"""Mamba 2 (Dao and Gu, 2024): a selective state space of heads, whose decay is one number a head and token.

Projections of a token go through a short convolution; what the state gives is gated and normed. Ranks of a
tensor-parallel group split the heads; a group of B and C that heads of several ranks read lies on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from app.checkpoints.tensors.leaf import Share
from app.errors import ConfigError
from app.kernels.gemm import Activations, materialize
from app.kernels.recurrent import SpaceInputs, StateStep
from app.layers.cache_spec import LayerStateSpec, StateTensor
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.gated_group_norm import GatedGroupNorm
from app.layers.linear import MergedColumnLinear, RowLinear
from app.layers.short_conv import HeadNumbers, ShortConv
from app.layers.side_by_side import SideBySide
from app.layers.state_layer import StateLayer

PARTS = ("in_proj_z", "in_proj_x", "in_proj_b", "in_proj_c", "in_proj_dt")


@dataclass(slots=True, frozen=True)
class Mamba2Settings:
    """The shape of one layer, before it is split over ranks."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    conv_bias: bool
    bias: bool  # of the projections
    norm_eps: float
    norm_groups: int  # of channels that are normed together; 0: what the state gives is gated alone
    norms_first: bool = False  # before the gate
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    input_scale: float = 1.0
    part_scales: tuple[float, ...] = ()  # of each of PARTS; (): 1

    @property
    def sizes(self) -> dict[str, int]:
        """The outputs of the projection, one behind the other."""
        channels, groups = self.num_heads * self.head_dim, self.num_groups * self.state_size
        return dict(zip(PARTS, (channels, channels, groups, groups, self.num_heads), strict=True))


class Mamba2(StateLayer):
    """Stands where other layers attend."""

    def __init__(self, ctx: BuildContext, hidden_size: int, settings: Mamba2Settings, layer_index: int) -> None:
        super().__init__(ctx, layer_index)
        s, tp = settings, ctx.groups.tp
        if s.num_groups % tp.size and tp.size % s.num_groups:
            raise ConfigError(
                f"tensor_parallel_size={tp.size} is neither a divisor nor a multiple of the {s.num_groups} groups of a "
                "layer's B and C (n_groups)",
                param="tensor_parallel_size",
            )
        self.num_heads, self.head_dim = tp.share_of(s.num_heads, "mamba_n_heads"), s.head_dim
        self.num_groups, self.state_size = max(1, s.num_groups // tp.size), s.state_size
        copies = max(1, tp.size // s.num_groups)
        shared = {"in_proj_b": copies, "in_proj_c": copies}
        self.in_proj = MergedColumnLinear(ctx, hidden_size, s.sizes, s.bias, shared)
        shares = self.in_proj.output_shares
        convolved = [shares[name] for name in PARTS[1:4]]
        self.conv1d = ShortConv(ctx, convolved, s.conv_width, bias=s.conv_bias)
        self.widths = [share.size for share in convolved]
        self.parts = [shares["in_proj_z"].size, sum(self.widths), self.num_heads]
        of_heads = HeadNumbers(Share(0, self.num_heads, tp.rank * self.num_heads, s.num_heads))
        self.A_log, self.D, self.dt_bias = (of_heads.weight(dummy) for dummy in (0.0, 1.0, 0.0))
        channels = Share(0, self.parts[0], shares["in_proj_z"].start, shares["in_proj_z"].whole)
        self.norm = (
            GatedGroupNorm(ctx, channels, s.norm_groups, s.norm_eps, norms_first=s.norms_first)
            if s.norm_groups
            else None
        )
        self.out_proj = RowLinear(ctx, s.num_heads * s.head_dim, hidden_size, s.bias)
        self.dt_limit, self.input_scale = s.dt_limit, s.input_scale
        sizes = [share.size for share in shares.values()]
        self.scales = None
        if s.part_scales:
            of_part = torch.tensor(s.part_scales, device=ctx.device)
            self.scales = of_part.repeat_interleave(torch.tensor(sizes, device=ctx.device)).to(ctx.dtype)

    def state_spec(self) -> LayerStateSpec:
        """The last inputs of the convolution, and the state of each head [P, N]."""
        state = StateTensor((self.num_heads, self.head_dim, self.state_size), self.state_dtype)
        return LayerStateSpec((self.conv1d.state, state))

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        projected = self.in_proj.apart(x if self.input_scale == 1.0 else materialize(x) * self.input_scale)
        if self.scales is not None:
            projected = SideBySide((projected.whole() * self.scales,))
        return self.out_proj(self.run(projected, ctx), epilogue)  # type: ignore[no-any-return]

    def recur(self, projected: SideBySide, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """See StateLayer."""
        inputs, of_heads = states
        gate, mixed, dt = projected.split(self.parts)
        mixed = self.conv1d(mixed, inputs, step)
        u, b, c = torch.split(mixed, self.widths, dim=1)
        num_tokens, of_groups = len(mixed), (self.num_groups, self.state_size)
        space = SpaceInputs(
            x=u.view(num_tokens, self.num_heads, self.head_dim),
            b=b.view(num_tokens, *of_groups),
            c=c.view(num_tokens, *of_groups),
            dt=dt,
            a_log=self.A_log,
            d=self.D,
            dt_bias=self.dt_bias,
            dt_limit=self.dt_limit,
        )
        out: torch.Tensor = self.ops.state_space(space, of_heads, step).flatten(1)
        return (out.float() * F.silu(gate.float())).to(out.dtype) if self.norm is None else self.norm(out, gate)
