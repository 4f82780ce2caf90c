"""The encoder that BERT and RoBERTa share: every token sees the whole text, norms come after the residual sums.

Query, key and value are one matrix; the parts that a checkpoint names otherwise are renamed by each family's file.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import nn

from app.engine.layers.activation import activation
from app.engine.layers.attention_layer import AttentionLayer
from app.engine.layers.cache_spec import LayerCacheSpec
from app.engine.layers.context import BuildContext, ForwardContext
from app.engine.layers.layer_norm import LayerNorm
from app.engine.layers.linear import ColumnLinear, QKVLinear, RowLinear
from app.engine.layers.replicated import ReplicatedTable
from app.engine.layers.vocab import VocabEmbedding
from app.engine.model_info import ModelInfo
from app.errors import UnsupportedError
from app.kernels.attention import AttentionMetadata
from app.kernels.attention.encoder import EncoderPlan, encoder_attention, plan_encoder


@dataclass(slots=True, frozen=True)
class EncoderSettings:
    """Sizes of an encoder, from config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    hidden_act: str
    num_positions: int
    position_offset: int  # row of the first token's position in the table
    num_token_types: int

    @classmethod
    def from_info(cls, info: ModelInfo) -> EncoderSettings:
        """UnsupportedError refuses what the family's later variants do otherwise."""
        hf = info.hf_config
        if hf.get("position_embedding_type", "absolute") != "absolute" or hf.get("is_decoder"):
            raise UnsupportedError("only encoders with absolute position embeddings are supported", param="model")
        return cls(
            vocab_size=info.vocab_size,
            hidden_size=int(hf["hidden_size"]),
            intermediate_size=int(hf["intermediate_size"]),
            num_layers=info.num_layers,
            num_heads=info.num_heads,
            norm_eps=float(hf.get("layer_norm_eps", 1e-12)),
            hidden_act=str(hf.get("hidden_act", "gelu")),
            num_positions=int(hf.get("max_position_embeddings", 512)),
            position_offset=info.position_offset,
            num_token_types=int(hf.get("type_vocab_size", 2)),
        )


class EncoderEmbeddings(nn.Module):
    """Token + position + type, normalised."""

    def __init__(self, ctx: BuildContext, settings: EncoderSettings) -> None:
        super().__init__()
        s = settings
        self.word_embeddings = VocabEmbedding(ctx, s.vocab_size, s.hidden_size)
        self.position_embeddings = ReplicatedTable(ctx, s.num_positions, s.hidden_size)
        self.token_type_embeddings = ReplicatedTable(ctx, s.num_token_types, s.hidden_size)
        self.norm = LayerNorm(ctx, s.hidden_size, s.norm_eps)
        self.offset = s.position_offset

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> [T, C]."""
        x = self.word_embeddings(input_ids) + self.position_embeddings(ctx.positions + self.offset)
        types = ctx.inputs.get("token_types")  # int64 [T], 1 = second text of a pair
        x = x + (self.token_type_embeddings.weight[0] if types is None else self.token_type_embeddings(types))
        return self.norm(x)  # type: ignore[no-any-return]


class EncoderAttention(AttentionLayer):
    """Self-attention over the whole text, without a cache."""

    def __init__(self, ctx: BuildContext, settings: EncoderSettings, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        s = settings
        self.head_dim = s.hidden_size // s.num_heads
        self.qkv_proj = QKVLinear(ctx, s.hidden_size, self.head_dim, s.num_heads, s.num_heads, bias=True)
        self.o_proj = RowLinear(ctx, s.hidden_size, s.hidden_size, bias=True)
        self.num_heads = self.qkv_proj.num_heads

    @property
    def plan_key(self) -> Hashable:
        """The same key everywhere: all layers of all encoders share one plan."""
        return EncoderPlan

    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        """Plan a step: texts in groups of similar length."""
        assert meta.host_starts is not None, "an encoder's step is not over static tensors"
        meta.plan = plan_encoder(meta.host_starts.tolist(), meta.seq_lens.device)

    def cache_spec(self) -> LayerCacheSpec | None:
        """None: every prompt is computed in one step, so nothing is cached."""
        return None

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        plan = ctx.attention[self.layer_index].plan
        assert isinstance(plan, EncoderPlan)
        query, key, value = self.qkv_proj(x).view(x.shape[0], 3, self.num_heads, self.head_dim).unbind(1)
        attended = encoder_attention(query, key, value, plan, self.head_dim**-0.5)
        return self.o_proj(attended.reshape(x.shape[0], -1))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, ctx: BuildContext, settings: EncoderSettings, layer_index: int) -> None:
        super().__init__()
        s = settings
        self.attention = EncoderAttention(ctx, s, layer_index)
        self.attention_norm = LayerNorm(ctx, s.hidden_size, s.norm_eps)
        self.up_proj = ColumnLinear(ctx, s.hidden_size, s.intermediate_size, bias=True)
        self.down_proj = RowLinear(ctx, s.intermediate_size, s.hidden_size, bias=True)
        self.output_norm = LayerNorm(ctx, s.hidden_size, s.norm_eps)
        self.act = activation(s.hidden_act)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        x = self.attention_norm(x + self.attention(x, ctx))
        return self.output_norm(x + self.down_proj(self.act(self.up_proj(x))))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Embeddings and encoder layers."""

    def __init__(self, ctx: BuildContext, settings: EncoderSettings) -> None:
        super().__init__()
        self.embeddings = EncoderEmbeddings(ctx, settings)
        self.layers = nn.ModuleList(EncoderLayer(ctx, settings, index) for index in range(settings.num_layers))

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        x = self.embeddings(input_ids, ctx)
        for layer in self.layers:
            x = layer(x, ctx)
        return x  # type: ignore[no-any-return]


_RENAMED = (
    ("encoder.layer.", "layers."),
    ("attention.self.query.", "attention.q_proj."),
    ("attention.self.key.", "attention.k_proj."),
    ("attention.self.value.", "attention.v_proj."),
    ("attention.output.dense.", "attention.o_proj."),
    ("attention.output.LayerNorm.", "attention_norm."),
    ("intermediate.dense.", "up_proj."),
    ("output.dense.", "down_proj."),
    ("output.LayerNorm.", "output_norm."),
    ("embeddings.LayerNorm.", "embeddings.norm."),
    (".gamma", ".weight"),  # in checkpoints converted from TensorFlow
    (".beta", ".bias"),
)


def own_encoder_name(name: str, prefix: str) -> str | None:
    """Name in `Encoder` of a tensor of a BERT-like checkpoint, whose encoder may lie under `prefix`; None: no part."""
    name = name.removeprefix(prefix)
    if not name.startswith(("embeddings.", "encoder.")) or name.endswith(("position_ids", "token_type_ids")):
        return None
    for theirs, ours in _RENAMED:
        name = name.replace(theirs, ours)
    return "encoder." + name
