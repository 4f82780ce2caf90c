"""DPR's encoders of questions and of passages: BERT, whose first token is compared as it is."""

from __future__ import annotations

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.models.encoder import EncoderSettings
from app.models.families.bert import BertModel


class DPRContextEncoder(BertModel):
    """That of passages."""

    prefix = "ctx_encoder.bert_model."

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """Those of BERT. UnsupportedError where vectors are made narrower, which no published encoder does."""
        if info.hf_config.get("projection_dim"):
            what = f"projection_dim={info.hf_config['projection_dim']!r:.80}"
            raise UnsupportedError(f"{info.architecture} with {what} is not supported", param="model")
        return EncoderSettings.from_info(info)


class DPRQuestionEncoder(DPRContextEncoder):
    """That of questions."""

    prefix = "question_encoder.bert_model."
