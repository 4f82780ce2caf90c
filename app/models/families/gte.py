"""GTE's encoders (gte-v1.5, gte-multilingual, Arctic Embed M v2), as they were published: BERT with rotary positions,
gated feed-forward layers, and queries, keys and values in one."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.mlp import GatedMLP
from app.layers.rope_scaling import RopeSettings
from app.models.encoder import Encoder, EncoderClassifier, EncoderModel, EncoderSettings, Fused

_USUAL = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False}


class NewModel(EncoderModel):
    """The feed-forward layer has a bias behind its last product only."""

    prefix = "new."
    names = (
        (r"^encoder\.layer\.", "layers."),
        (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
        (r"\.attn_ln\.", ".attention_norm."),
        (r"\.mlp_ln\.", ".output_norm."),
    )
    fused = MappingProxyType(
        {
            ".attention.qkv_proj.": Fused.heads(".attention."),
            ".mlp.up_gate_proj.": Fused((".mlp.up_proj.", ".mlp.gate_proj."), of_mlp=True),
        }
    )

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """The settings of config.json. UnsupportedError names what no published model has."""
        hf = info.hf_config
        for name, usual in _USUAL.items():
            if hf.get(name, usual) != usual:
                raise UnsupportedError(
                    f"{info.architecture} with {name}={hf[name]!r:.80} is not supported", param="model"
                )
        rope = RopeSettings.from_hf(hf, info.hidden_size // info.num_heads, info.max_position_embeddings)
        as_bert = {"type_vocab_size": 1, **hf, "position_embedding_type": "absolute"}
        settings = EncoderSettings.from_info(replace(info, hf_config=as_bert))
        return replace(settings, num_positions=0, rope=rope, is_gated=True)

    def make_encoder(self, ctx: BuildContext, info: ModelInfo) -> nn.Module:
        """A feed-forward layer with one bias."""
        s = self.settings(info)
        own = ctx, s.hidden_size, s.intermediate_size, s.hidden_act
        return Encoder(ctx, s, mlps=[GatedMLP(*own, bias=False, down_bias=True) for _ in range(s.num_layers)])


class NewForSequenceClassification(EncoderClassifier, NewModel):
    """tanh(dense(first token)), then the classifier (gte-multilingual-reranker)."""

    head_names = ("new.pooler.dense.", "classifier.")
