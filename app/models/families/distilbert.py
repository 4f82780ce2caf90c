"""DistilBERT: half of BERT's layers, and no token types."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.models.encoder import EncoderClassifier, EncoderModel, EncoderSettings
from app.models.vocabulary import EncoderForMaskedLM


class DistilBertModel(EncoderModel):
    """DistilBERT without a head."""

    prefix = "distilbert."
    roots = ("embeddings.", "transformer.")
    names = (
        (r"^transformer\.layer\.", "layers."),
        (r"\.attention\.(q|k|v)_lin\.", r".attention.\1_proj."),
        (r"\.attention\.out_lin\.", ".attention.o_proj."),
        (r"\.sa_layer_norm\.", ".attention_norm."),
        (r"\.ffn\.lin1\.", ".mlp.up_proj."),
        (r"\.ffn\.lin2\.", ".mlp.down_proj."),
        (r"\.output_layer_norm\.", ".output_norm."),
        (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    )

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """Sinusoidal positions are stored like learned ones."""
        act = str(info.hf_config.get("activation", "gelu"))
        return replace(EncoderSettings.from_info(info), hidden_act=act, num_token_types=0)


class DistilBertForSequenceClassification(EncoderClassifier, DistilBertModel):
    """classifier(relu(pre_classifier(first token)))."""

    head_names = ("pre_classifier.", "classifier.")
    head_act = "relu"


class DistilBertForMaskedLM(EncoderForMaskedLM, DistilBertModel):
    """DistilBERT, or SPLADE over it."""

    head_names = MappingProxyType(
        {"vocab_transform.": "dense.", "vocab_layer_norm.": "norm.", "vocab_projector.bias": "head.bias"}
    )
