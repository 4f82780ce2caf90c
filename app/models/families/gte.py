"""GTE's encoders (gte-v1.5, gte-multilingual, Arctic Embed M v2), as they were published: BERT with rotary positions,
gated feed-forward layers, and queries, keys and values in one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import split_rows
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.mlp import GatedMLP
from app.layers.rope_scaling import RopeSettings
from app.models.encoder import Encoder, EncoderClassifier, EncoderModel, EncoderSettings

_USUAL = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False}
_FUSED = {
    ".attention.qkv_proj.": ("q_proj", "k_proj", "v_proj"),
    ".mlp.up_gate_proj.": ("up_proj", "gate_proj"),
}


class NewModel(EncoderModel):
    """The feed-forward layer has a bias behind its last product only."""

    prefix = "new."
    names = (
        (r"^encoder\.layer\.", "layers."),
        (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
        (r"\.attn_ln\.", ".attention_norm."),
        (r"\.mlp_ln\.", ".output_norm."),
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.part_sizes = dict(zip(_FUSED, (info.hidden_size, info.intermediate_size), strict=True))

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

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Fused tensors apart."""
        for own, one in super().own_tensors(name, tensor):
            fused = next((part for part in _FUSED if part in own), None)
            if fused is None:
                yield own, one
                continue
            head, _, leaf = own.rpartition(fused)
            block = fused.split(".")[1]
            parts = split_rows(one, dict.fromkeys(_FUSED[fused], self.part_sizes[fused]))
            yield from ((f"{head}.{block}.{part}.{leaf}", rows) for part, rows in parts)


class NewForSequenceClassification(EncoderClassifier, NewModel):
    """tanh(dense(first token)), then the classifier (gte-multilingual-reranker)."""

    head_names = ("new.pooler.dense.", "classifier.")
