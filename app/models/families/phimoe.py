"""Phi-3.5-MoE: layer norms, biases, and experts that are chosen one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.errors import UnsupportedError
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.layers.rope_scaling import RopeSettings
from app.models.blocks import Blocks, layer_norm
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_settings import DecoderSettings, one_window
from app.models.families.mixtral import MIXTRAL_NAMES


class PhimoeForCausalLM(CausalLM):
    """Two experts by SparseMixer's rule of inference."""

    blocks = Blocks(norm=layer_norm)
    rope_defaults = MappingProxyType({"rope_theta": 1_000_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; UnsupportedError for more experts a token than two."""
        hf = info.hf_config
        if (top_k := int(hf.get("num_experts_per_tok", 2))) != 2:
            raise UnsupportedError(f"num_experts_per_tok={top_k}: this family chooses two", param="model")
        experts = ExpertSettings(
            num_experts=int(hf.get("num_local_experts", 16)),
            intermediate_size=info.intermediate_size,
            rule=RoutingRule(top_k=2, scoring="sparsemixer", jitter=float(hf.get("router_jitter_noise", 0.01))),
            layers=frozenset(range(info.num_layers)),
            rounds_weights=True,
        )
        bias = bool(hf.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            qkv_bias=bias,
            output_bias=bias,
            head_bias=bool(hf.get("lm_head_bias", False)),
            sliding_windows=one_window(info),
            experts=experts,
        )

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """longrope, whose factor of cosines and sines config.json gives for either table."""
        plain = super().ropes(info, settings, max_model_len)

        def of(layer_type: str) -> RopeSettings:
            rope = plain(layer_type)
            if rope.rope_type != "longrope":
                return rope
            kind = "long" if max_model_len > rope.number("original_max_position_embeddings") else "short"
            factor = rope.number(f"{kind}_mscale")
            return replace(rope, parameters={**rope.parameters, "attention_factor": factor})

        return of

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names."""
        return [(renamed(name, [*MIXTRAL_NAMES, (r"\.mlp\.router\.", ".mlp.gate.")]), tensor)]
