"""ColQwen2 (Faysse et al., 2024): a vector of each token of a page's picture, by Qwen2-VL or Qwen2.5-VL."""

from __future__ import annotations

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.models.decoder import CausalLM
from app.models.multimodal.page_retrieval import PageRetrieval
from app.models.multimodal.qwen2_vl import Qwen2_5_VLForConditionalGeneration, Qwen2VLForConditionalGeneration

_FAMILIES: dict[str, type[CausalLM]] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
}


class ColQwen2ForRetrieval(PageRetrieval):
    """The model within is whichever config.json holds."""

    @staticmethod
    def family_of(info: ModelInfo) -> type[CausalLM]:
        """See DecoderForPooling."""
        kind = str(info.hf_config.get("model_type"))
        if kind not in _FAMILIES:
            raise UnsupportedError(f"{info.architecture} over a model of type {kind!r:.80}", param="model")
        return _FAMILIES[kind]
