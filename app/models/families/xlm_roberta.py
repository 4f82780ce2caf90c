"""RoBERTa, XLM-RoBERTa (multilingual E5, BGE-M3, BGE rerankers) and CamemBERT: BERT with positions that begin behind
the padding token's, and a classification head of its own."""

from __future__ import annotations

from types import MappingProxyType

from app.models.encoder import EncoderClassifier
from app.models.families.bert import BertModel
from app.models.vocabulary import EncoderForMaskedLM


class RobertaModel(BertModel):
    """RoBERTa without a head."""

    prefix = "roberta."


class RobertaForSequenceClassification(EncoderClassifier, RobertaModel):
    """out_proj(tanh(dense(first token)))."""

    head_names = ("classifier.dense.", "classifier.out_proj.")


class RobertaForMaskedLM(EncoderForMaskedLM, RobertaModel):
    """RoBERTa, or SPLADE over it."""

    head_names = MappingProxyType(
        {"lm_head.dense.": "dense.", "lm_head.layer_norm.": "norm.", "lm_head.bias": "head.bias"}
    )
