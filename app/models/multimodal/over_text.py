"""Models whose checkpoints put an encoder over a language model of another family."""

from __future__ import annotations

from collections.abc import Mapping

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.models.blocks import Blocks
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_settings import DecoderSettings
from app.models.families.granite import GraniteForCausalLM
from app.models.families.llama import LlamaForCausalLM
from app.models.families.mistral import MistralForCausalLM
from app.models.families.qwen2 import Qwen2ForCausalLM
from app.models.families.qwen3 import Qwen3ForCausalLM
from app.models.multimodal.base import MediaModel

# Families of texts by the model type of `text_config`: those whose tensors need nothing but their names.
TEXTS: Mapping[str, type[CausalLM]] = {
    "granite": GraniteForCausalLM,
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


class MediaOverText(MediaModel):
    """The text's settings, blocks and positions are its own family's."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """See CausalLM."""
        return text_family(info).settings(info)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """See CausalLM."""
        return text_family(info).blocks_of(info)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """See CausalLM."""
        return text_family(info).ropes(info, settings, max_model_len)


def text_family(info: ModelInfo) -> type[CausalLM]:
    """The family of the text part; UnsupportedError lists what there is."""
    kind = str(info.hf_config.get("text_model_type"))
    if kind not in TEXTS:
        known = ", ".join(sorted(TEXTS))
        raise UnsupportedError(f"{info.architecture} over text of type {kind!r}: known are {known}", param="model")
    return TEXTS[kind]
