"""Ministral: Mistral with windows on some layers; the third one with YaRN and queries that grow with the position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import text_name
from app.layers.rope_scaling import RopeSettings
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_settings import DecoderSettings, layer_types, one_window, windows_of

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class MinistralForCausalLM(CausalLM):
    """Ministral 8B of 2024."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        types = layer_types(info, ["sliding_attention"] * info.num_layers)
        return replace(DecoderSettings.from_info(info), sliding_windows=windows_of(info, types, 4096))


class Ministral3ForCausalLM(CausalLM):
    """Ministral 3, also where its checkpoint sees images: these parts are left out."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; a head is 128 wide where it does not say."""
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            head_dim=int(info.hf_config.get("head_dim") or 128),
            sliding_windows=one_window(info),
        )

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """The family's scaling, where config.json says nothing; Mistral Small 3 has a base, and no scaling."""
        says_nothing = info.hf_config.keys().isdisjoint(("rope_parameters", "rope_scaling", "rope_theta"))
        hf = {"rope_parameters": _ROPE} | info.hf_config if says_nothing else info.hf_config
        return lambda layer_type: RopeSettings.from_hf(hf, settings.head_dim, max_model_len, layer_type)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Leaves out what sees images."""
        own = text_name(name)
        return [] if own is None else [(own, tensor)]
