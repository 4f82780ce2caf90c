"""The feed-forward layer without a gate, as GPT-2 has it."""

from __future__ import annotations

from app.kernels.gemm import Activations
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Act, Epilogue, ResultT
from app.layers.layer import Layer
from app.layers.linear import ColumnLinear, RowLinear


class PlainMLP(Layer):
    """down(act(up(x)))."""

    def __init__(
        self, ctx: BuildContext, hidden_size: int, intermediate_size: int, hidden_act: str, bias: bool
    ) -> None:
        super().__init__()
        self.up_proj = ColumnLinear(ctx, hidden_size, intermediate_size, bias)
        self.down_proj = RowLinear(ctx, intermediate_size, hidden_size, bias)
        self.act = Act(ctx, hidden_act)

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext | None = None) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        return self.down_proj(self.up_proj(x, self.act), epilogue)  # type: ignore[no-any-return]
