"""ModernBERT (Warner et al., 2024): rotary positions, windows in two of three layers, gated feed-forward layers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.layers.activation import activation
from app.layers.attention import AttentionSettings
from app.layers.context import BuildContext
from app.layers.encoder_attention import EncoderAttention
from app.layers.layer_norm import LayerNorm
from app.layers.mlp import GatedMLP
from app.layers.replicated import ReplicatedLinear
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.layers.vocab import VocabEmbedding
from app.models.decoder_settings import layer_types
from app.models.encoder import EncoderModel, Fused
from app.models.pre_norm_encoder import PreNormEncoder, PreNormEncoderLayer
from app.records.pooling_info import PoolingInfo

_SLIDING, _FULL = "sliding_attention", "full_attention"
_THETAS = {_FULL: ("global_rope_theta", 160_000.0), _SLIDING: ("local_rope_theta", 10_000.0)}


def _norm(ctx: BuildContext, info: ModelInfo) -> LayerNorm:
    hf = info.hf_config
    return LayerNorm(ctx, info.hidden_size, float(hf.get("norm_eps", 1e-5)), bias=bool(hf.get("norm_bias", False)))


class ModernBertModel(EncoderModel):
    """ModernBERT without a head."""

    prefix = "model."
    roots = ("embeddings.", "layers.", "final_norm.")
    names = (
        (r"^embeddings\.tok_embeddings\.", "word_embeddings."),
        (r"^embeddings\.norm\.", "embedding_norm."),
        (r"\.attn_norm\.", ".attention_norm."),
        (r"\.attn\.Wo\.", ".attention.o_proj."),
        (r"\.attn\.", ".attention."),
        (r"\.mlp\.Wo\.", ".mlp.down_proj."),
    )
    fused = MappingProxyType(
        {".Wqkv.": Fused.heads(), ".Wi.": Fused((".gate_proj.", ".up_proj."), of_mlp=True)},
    )

    def make_encoder(self, ctx: BuildContext, info: ModelInfo) -> nn.Module:
        """The first layer's attention reads what the embedding's norm gives."""
        hf = info.hf_config
        every = int(hf.get("global_attn_every_n_layers", 3))
        types = layer_types(info, [_SLIDING if i % every else _FULL for i in range(info.num_layers)])
        ropes = {kind: self._rope(ctx, info, kind) for kind in dict.fromkeys(types)}
        act, bias = str(hf.get("hidden_activation", "gelu")), bool(hf.get("mlp_bias", False))
        layers = [
            PreNormEncoderLayer(
                _norm(ctx, info) if place else None,
                EncoderAttention(ctx, self._attention(info, kind), place, ropes[kind]),
                _norm(ctx, info),
                GatedMLP(ctx, info.hidden_size, info.intermediate_size, act, bias),
            )
            for place, kind in enumerate(types)
        ]
        table = VocabEmbedding(ctx, info.vocab_size, info.hidden_size)
        return PreNormEncoder(table, _norm(ctx, info), layers, _norm(ctx, info))

    @staticmethod
    def _attention(info: ModelInfo, kind: str) -> AttentionSettings:
        """Half of `local_attention` lies on each side of a token."""
        hf = info.hf_config
        bias = bool(hf.get("attention_bias", False))
        return AttentionSettings(
            hidden_size=info.hidden_size,
            num_heads=info.num_heads,
            num_kv_heads=info.num_heads,
            head_dim=info.head_dim,
            qkv_bias=bias,
            output_bias=bias,
            norm_eps=float(hf.get("norm_eps", 1e-5)),
            sliding_window=int(hf.get("local_attention", 128)) // 2 + 1 if kind == _SLIDING else None,
        )

    @staticmethod
    def _rope(ctx: BuildContext, info: ModelInfo, kind: str) -> RotaryEmbedding:
        """Before transformers 5, each kind of layer had a base under a name of its own."""
        name, default = _THETAS[kind]
        hf: dict[str, Any] = {"rope_theta": info.hf_config.get(name, default), **info.hf_config}
        settings = RopeSettings.from_hf(hf, info.head_dim, ctx.max_model_len, kind)
        return RotaryEmbedding(settings, ctx.max_model_len, ctx.dtype, ctx.device)


class ModernBertForSequenceClassification(ModernBertModel):
    """classifier(norm(act(dense(pooled)))), over the first token or the mean, as `classifier_pooling` says."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        hf, size = info.hf_config, info.hidden_size
        self.num_labels = len(PoolingInfo.of(info).labels)
        self.dense = ReplicatedLinear(ctx, size, size, bias=bool(hf.get("classifier_bias", False)))
        self.act = activation(str(hf.get("classifier_activation", "gelu")))
        self.norm = _norm(ctx, info)
        self.classifier = ReplicatedLinear(ctx, size, self.num_labels)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [N, C] -> logits [N, num_labels]."""
        return self.classifier(self.norm(self.act(self.dense(pooled))))  # type: ignore[no-any-return]

    def own_name(self, name: str) -> str | None:
        """Names beside the encoder's: `head` and `classifier`."""
        if name.startswith(("head.", "classifier.")):
            return name.removeprefix("head.")
        return super().own_name(name)
