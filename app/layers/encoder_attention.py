"""Self-attention of encoders: every token sees the whole text, or a window on both sides. Nothing is cached."""

from __future__ import annotations

from collections.abc import Hashable

from app.errors import UnsupportedError
from app.kernels.attention import AttentionMetadata
from app.kernels.attention.encoder import EncoderPlan, ScoreBias, plan_encoder
from app.kernels.fused import FUSED_OPS
from app.kernels.gemm import Activations
from app.layers.attention import AttentionSettings
from app.layers.attention_layer import AttentionLayer
from app.layers.cache_spec import LayerCacheSpec
from app.layers.context import BuildContext, ForwardContext
from app.layers.distance_bias import DistanceBias
from app.layers.epilogue import Epilogue, ResultT
from app.layers.linear import QKVLinear, RowLinear
from app.layers.query_key_norm import QUERY_KEY_NORMS, HeadShare
from app.layers.rotary import RotaryEmbedding


class EncoderAttention(AttentionLayer):
    """Reads the same settings as a decoder's attention; `sliding_window` counts the tokens of one side, the token
    itself included."""

    def __init__(
        self,
        ctx: BuildContext,
        settings: AttentionSettings,
        layer_index: int,
        rotary: RotaryEmbedding | None = None,
        by_distance: DistanceBias | None = None,
    ) -> None:
        super().__init__()
        s = settings
        if s.soft_cap is not None or s.alibi_slopes or s.sinks or s.clip is not None or s.qk_norm == "turned_head_rms":
            raise UnsupportedError(
                "attention in both directions is supported without soft caps, ALiBi, sinks and clipping", param="model"
            )
        self.layer_index, self.head_dim = layer_index, s.head_dim
        self.qkv_proj = QKVLinear(ctx, s.hidden_size, s.head_dim, s.num_heads, s.num_kv_heads, s.qkv_bias)
        self.o_proj = RowLinear(ctx, s.num_heads * s.head_dim, s.hidden_size, s.output_bias)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm = self.k_norm = None
        if s.qk_norm is not None:
            make, tp = QUERY_KEY_NORMS[s.qk_norm], ctx.groups.tp
            self.q_norm = make(ctx, HeadShare(tp, s.num_heads, self.num_heads), s.head_dim, s.norm_eps)
            self.k_norm = make(ctx, HeadShare(tp, s.num_kv_heads, self.num_kv_heads), s.head_dim, s.norm_eps)
        self.scale = s.head_dim**-0.5 if s.scale is None else s.scale
        self.window, self.rotary = s.sliding_window, rotary
        self._rotate_heads = ctx.kernels(FUSED_OPS).rotate_heads
        self._bias_of_step = None if by_distance is None else by_distance.of_step

    @property
    def plan_key(self) -> Hashable:
        """The same key everywhere: all layers of all encoders share one plan."""
        return EncoderPlan

    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        """Plan a step over its texts."""
        assert meta.host_starts is not None, "an encoder's step is not over static tensors"
        meta.plan = plan_encoder(meta.host_starts.tolist(), meta.seq_lens.device)

    def cache_spec(self) -> LayerCacheSpec | None:
        """None: every prompt is computed in one step, so nothing is cached."""
        return None

    @property
    def has_bias(self) -> bool:
        """True if something is added to its scores."""
        return self._bias_of_step is not None or type(self).score_bias is not EncoderAttention.score_bias

    def score_bias(self, ctx: ForwardContext) -> ScoreBias | None:
        """Returns what is added to the scores; None: nothing."""
        return None if self._bias_of_step is None else self._bias_of_step(ctx)

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        plan = ctx.attention[self.layer_index].plan
        assert isinstance(plan, EncoderPlan)
        qkv = self.qkv_proj(x)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        rotation = None if self.rotary is None else self.rotary.of_step(ctx)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
            if rotation is not None:
                query, key = rotation.apply(query), rotation.apply(key)
        elif rotation is not None:
            turned = heads[:, : self.num_heads + self.num_kv_heads]
            self._rotate_heads(turned, rotation.cos, rotation.sin, None, self.num_heads)
        bias = self.score_bias(ctx)
        seen = ctx.inputs.get("seen")
        attended = plan.attend(query, key, value, self.scale, self.window, bias, seen)
        return self.o_proj(attended.reshape(len(attended), -1), epilogue)  # type: ignore[no-any-return]
