"""ColQwen2 (Faysse et al., 2024): a vector of each token of a page's picture, by Qwen2-VL or Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Iterable

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import UnsupportedError
from app.models.decoder import CausalLM
from app.models.multimodal.media_pooling import MediaForPooling
from app.models.multimodal.qwen2_vl import Qwen2_5_VLForConditionalGeneration, Qwen2VLForConditionalGeneration
from app.records.late_interaction import PICTURED

_FAMILIES: dict[str, type[CausalLM]] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
}


class ColQwen2ForRetrieval(MediaForPooling):
    """The model within is whichever config.json holds."""

    @staticmethod
    def family_of(info: ModelInfo) -> type[CausalLM]:
        """See DecoderForPooling."""
        kind = str(info.hf_config.get("model_type"))
        if kind not in _FAMILIES:
            raise UnsupportedError(f"{info.architecture} over a model of type {kind!r:.80}", param="model")
        return _FAMILIES[kind]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The inner model's; the pooler reads the layer behind it by itself."""
        if name.startswith(f"{PICTURED[type(self).__name__].layer}."):
            return []
        own = name.removeprefix("vlm.")
        bare = own.startswith("language_model.") and not own.startswith(("language_model.model.", "language_model.lm_"))
        return super().own_tensors(f"model.{own}" if bare else own, tensor)
