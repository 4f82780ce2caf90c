"""The gated feed-forward layer of Llama-like models (SwiGLU: Shazeer, 2020)."""

from __future__ import annotations

from app.kernels.gemm import Activations, GatedRows
from app.layers.activation import GATED_ACTIVATIONS, activation
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import ActMul, Epilogue, ResultT
from app.layers.layer import Layer
from app.layers.linear import MergedColumnLinear, RowLinear


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x)); gate and up are one matrix."""

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        bias: bool,
        down_bias: bool | None = None,
    ) -> None:
        """`down_bias`: whether the last product has one; None: as the others."""
        super().__init__()
        sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedColumnLinear(ctx, hidden_size, sizes, bias)
        self.down_proj = RowLinear(ctx, intermediate_size, hidden_size, bias if down_bias is None else down_bias)
        self.act = activation(hidden_act)
        fused = GATED_ACTIVATIONS.get(hidden_act)
        self.act_mul = ActMul(ctx, fused) if fused else None

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext | None = None) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        if self.act_mul is not None:
            product: GatedRows = self.gate_up_proj(x, self.act_mul)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            product = self.act(gate).mul_(up)
        return self.down_proj(product, epilogue)  # type: ignore[no-any-return]
