"""MPNet (all-mpnet-base-v2): BERT with a relative position bias beside its learned positions."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.models.encoder import EncoderClassifier, EncoderModel, EncoderSettings
from app.models.families.bert import BERT_NAMES


class MPNetModel(EncoderModel):
    """MPNet without a head."""

    prefix = "mpnet."
    names = (
        (r"\.attention\.attn\.(q|k|v|o)\.", r".attention.\1_proj."),
        (r"\.attention\.LayerNorm\.", ".attention_norm."),
        (r"^encoder\.relative_attention_bias\.", "relative."),
        *BERT_NAMES,
    )

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """No token types."""
        buckets = int(info.hf_config.get("relative_attention_num_buckets", 32))
        return replace(EncoderSettings.from_info(info), num_token_types=0, relative_buckets=buckets)


class MPNetForSequenceClassification(EncoderClassifier, MPNetModel):
    """out_proj(tanh(dense(first token)))."""

    head_names = ("classifier.dense.", "classifier.out_proj.")
