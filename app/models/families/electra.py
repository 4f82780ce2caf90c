"""ELECTRA: BERT whose tables may be narrower than its layers."""

from __future__ import annotations

from app.models.encoder import EncoderClassifier, EncoderModel
from app.models.families.bert import BERT_NAMES


class ElectraModel(EncoderModel):
    """The discriminator without a head."""

    prefix = "electra."
    roots = ("embeddings.", "embeddings_project.", "encoder.")
    names = ((r"^embeddings_project\.", "embeddings.project."), *BERT_NAMES)


class ElectraForSequenceClassification(EncoderClassifier, ElectraModel):
    """out_proj(gelu(dense(first token)))."""

    head_names = ("classifier.dense.", "classifier.out_proj.")
    head_act = "gelu"
