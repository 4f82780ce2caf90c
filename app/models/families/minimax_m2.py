"""MiniMax M2: norms over all queries and all keys together, experts chosen by sigmoids and a correction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import is_behind_last_layer, renamed
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_settings import DecoderSettings
from app.models.families.mixtral import MIXTRAL_NAMES

_NAMES = [*MIXTRAL_NAMES, (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias")]


def with_rotary_dim(info: ModelInfo, head_dim: int) -> ModelInfo:
    """The same model, with `rotary_dim` as the share of a head that it is."""
    hf = info.hf_config
    if "rotary_dim" not in hf:
        return info
    return replace(info, hf_config={"partial_rotary_factor": int(hf["rotary_dim"]) / head_dim, **hf})


class MiniMaxM2ForCausalLM(CausalLM):
    """A part of each head turns: `rotary_dim`, or `partial_rotary_factor` as elsewhere. What predicts further tokens is
    left out."""

    rope_defaults = MappingProxyType({"rope_theta": 5_000_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; a head is 128 wide where it does not say."""
        hf = info.hf_config
        experts = ExpertSettings(
            num_experts=int(hf.get("num_local_experts", 256)),
            intermediate_size=info.intermediate_size,
            rule=RoutingRule(int(hf.get("num_experts_per_tok", 8)), "sigmoid", renormalize=True),
            layers=frozenset(range(info.num_layers)),
            corrects=True,
        )
        return replace(
            DecoderSettings.from_info(info),
            head_dim=int(hf.get("head_dim") or 128),
            qk_norm="projection_rms" if hf.get("use_qk_norm", True) else None,
            experts=experts,
        )

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """See CausalLM.ropes."""
        return super().ropes(with_rotary_dim(info, settings.head_dim), settings, max_model_len)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Mixtral's names."""
        return [] if is_behind_last_layer(name, settings.num_layers) else [(renamed(name, _NAMES), tensor)]
