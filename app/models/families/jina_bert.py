"""Jina Embeddings v2 as published: BERT with ALiBi both ways in place of positions, and gated feed-forward layers; in
the model of programs queries and keys are normed, and attention's output a second time."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.layers.alibi_bias import AlibiBias
from app.layers.context import BuildContext, ForwardContext
from app.layers.encoder_attention import EncoderAttention
from app.layers.epilogue import PLAIN
from app.layers.layer_norm import LayerNorm
from app.layers.mlp import GatedMLP
from app.models.alibi import alibi_slopes
from app.models.encoder import Encoder, EncoderLayer, EncoderModel, EncoderSettings, Fused, attention_settings
from app.models.families.bert import BERT_NAMES

_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}
_OF_PROGRAMS = "qk-post-norm"  # in the name of that one's code, which config.json tells


class TwiceNormedLayer(EncoderLayer):
    """norm(x + attention(x)), once more with x, then as any other."""

    def __init__(
        self, ctx: BuildContext, settings: EncoderSettings, attention: EncoderAttention, mlp: nn.Module | None = None
    ) -> None:
        super().__init__(ctx, settings, attention, mlp)
        self.second_norm = LayerNorm(ctx, settings.hidden_size, settings.norm_eps)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        attended = self.attention_norm.of_sum(self.attention(x, PLAIN, ctx), x)
        x = self.second_norm.of_sum(attended, x)
        return self.output_norm.of_sum(self.mlp(x, PLAIN, ctx), x)


class JinaBertModel(EncoderModel):
    """The feed-forward layer has a bias behind its last product only."""

    prefix = "bert."
    names = (
        (r"\.mlp\.wo\.", ".mlp.down_proj."),
        (r"\.mlp\.down_layer\.", ".mlp.down_proj."),
        (r"\.(mlp\.layernorm|layer_norm_2)\.", ".output_norm."),
        (r"\.layer_norm_1\.", ".second_norm."),
        (r"\.attention\.self\.layer_norm_(q|k)\.", r".attention.\1_norm."),
        *BERT_NAMES,
    )
    fused = MappingProxyType(
        {
            ".gated_layers.": Fused((".gate_proj.", ".up_proj."), of_mlp=True),
            ".up_gated_layer.": Fused((".up_proj.", ".gate_proj."), of_mlp=True),
        }
    )

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """No table of positions. UnsupportedError names what other models of this class have."""
        hf = info.hf_config
        kind, act = hf.get("position_embedding_type", "absolute"), str(hf.get("feed_forward_type", "original"))
        if kind != "alibi":
            raise UnsupportedError(f"{info.architecture} with position_embedding_type={kind!r:.80}", param="model")
        if act not in _ACTIVATIONS:
            raise UnsupportedError(f"{info.architecture} with feed_forward_type={act!r:.80}", param="model")
        as_bert = replace(info, hf_config={**hf, "position_embedding_type": "absolute"})
        return replace(EncoderSettings.from_info(as_bert), num_positions=0, hidden_act=_ACTIVATIONS[act])

    def make_encoder(self, ctx: BuildContext, info: ModelInfo) -> nn.Module:
        """Attention with ALiBi, and feed-forward layers with one bias."""
        s = self.settings(info)
        alibi, shape = AlibiBias(ctx, alibi_slopes(s.num_heads)), attention_settings(s)
        of_programs = _OF_PROGRAMS in str(info.hf_config.get("auto_map"))
        shape = replace(shape, qk_norm="projection_layer_norm") if of_programs else shape
        attentions = [EncoderAttention(ctx, shape, place, None, alibi) for place in range(s.num_layers)]
        own = ctx, s.hidden_size, s.intermediate_size, s.hidden_act
        mlps = [GatedMLP(*own, bias=False, down_bias=True) for _ in attentions]
        return Encoder(ctx, s, attentions, mlps=mlps, layer=TwiceNormedLayer if of_programs else EncoderLayer)
