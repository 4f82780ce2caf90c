"""Jina Embeddings v2 as published: BERT with ALiBi both ways in place of positions, and gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import split_rows
from app.errors import UnsupportedError
from app.layers.alibi_bias import AlibiBias
from app.layers.context import BuildContext
from app.layers.encoder_attention import EncoderAttention
from app.layers.mlp import GatedMLP
from app.models.alibi import alibi_slopes
from app.models.encoder import Encoder, EncoderModel, EncoderSettings, attention_settings
from app.models.families.bert import BERT_NAMES

_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}
_NORMED_QUERIES = "qk-post-norm"  # of the code that embeds programs


class JinaBertModel(EncoderModel):
    """The feed-forward layer has a bias behind its last product only."""

    prefix = "bert."
    names = (
        (r"\.mlp\.wo\.", ".mlp.down_proj."),
        (r"\.mlp\.layernorm\.", ".output_norm."),
        *BERT_NAMES,
    )

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.parts = dict.fromkeys(("gate_proj", "up_proj"), info.intermediate_size)

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """No table of positions. UnsupportedError names what other models of this class have."""
        hf = info.hf_config
        kind, act = hf.get("position_embedding_type", "absolute"), str(hf.get("feed_forward_type", "original"))
        if kind != "alibi":
            raise UnsupportedError(f"{info.architecture} with position_embedding_type={kind!r:.80}", param="model")
        if act not in _ACTIVATIONS:
            raise UnsupportedError(f"{info.architecture} with feed_forward_type={act!r:.80}", param="model")
        if _NORMED_QUERIES in str(hf.get("auto_map")):
            raise UnsupportedError(f"{info.architecture} of jina-bert-v2-{_NORMED_QUERIES}", param="model")
        as_bert = replace(info, hf_config={**hf, "position_embedding_type": "absolute"})
        return replace(EncoderSettings.from_info(as_bert), num_positions=0, hidden_act=_ACTIVATIONS[act])

    def make_encoder(self, ctx: BuildContext, info: ModelInfo) -> nn.Module:
        """Attention with ALiBi, and feed-forward layers with one bias."""
        s = self.settings(info)
        alibi, shape = AlibiBias(ctx, alibi_slopes(s.num_heads)), attention_settings(s)
        attentions = [EncoderAttention(ctx, shape, place, None, alibi) for place in range(s.num_layers)]
        own = ctx, s.hidden_size, s.intermediate_size, s.hidden_act
        return Encoder(ctx, s, attentions, mlps=[GatedMLP(*own, bias=False, down_bias=True) for _ in attentions])

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Gate and what it gates lie in one."""
        for own, one in super().own_tensors(name, tensor):
            head, found, leaf = own.rpartition(".gated_layers.")
            parts = split_rows(one, self.parts) if found else ()
            yield from ((f"{head}.{part}.{leaf}", rows) for part, rows in parts)
            if not found:
                yield own, one
