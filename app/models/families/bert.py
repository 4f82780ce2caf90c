"""BERT (MiniLM, BGE, E5, GTE, ...): embeddings, and classifiers over the pooled first token."""

from __future__ import annotations

from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.models.encoder import EncoderClassifier, EncoderModel
from app.models.vocabulary import EncoderForMaskedLM

BERT_NAMES = (
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.self\.query\.", ".attention.q_proj."),
    (r"\.attention\.self\.key\.", ".attention.k_proj."),
    (r"\.attention\.self\.value\.", ".attention.v_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".mlp.up_proj."),
    (r"\.output\.dense\.", ".mlp.down_proj."),
    (r"\.output\.LayerNorm\.", ".output_norm."),
    (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    (r"\.gamma$", ".weight"),  # in checkpoints converted from TensorFlow
    (r"\.beta$", ".bias"),
)


class BertModel(EncoderModel):
    """BERT without a head."""

    prefix = "bert."
    names = BERT_NAMES


class ColBert(BertModel):
    """The encoder of Stanford's ColBERT, whose linear layer over the tokens lies beside it."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        if info.hf_config.get("model_type") != "bert":
            kind = info.hf_config.get("model_type")
            raise UnsupportedError(f"{info.architecture} over {kind!r:.80} is not supported, BERT is", param="model")
        super().__init__(ctx, info)


class BertForSequenceClassification(EncoderClassifier, BertModel):
    """tanh(dense(first token)), then the classifier."""

    head_names = ("bert.pooler.dense.", "classifier.")


class BertForMaskedLM(EncoderForMaskedLM, BertModel):
    """BERT, or SPLADE over it."""

    head_names = MappingProxyType(
        {
            "cls.predictions.transform.dense.": "dense.",
            "cls.predictions.transform.LayerNorm.": "norm.",
            "cls.predictions.bias": "head.bias",
        }
    )
