"""LongCat-Flash: latent attention, two in a layer; experts beside them, some of which compute nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.checkpoints.tensors.tensor_view import computed
from app.errors import UnsupportedError
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.blocks import Blocks
from app.models.decoder_layers.shortcut import ShortcutLayer
from app.models.decoder_settings import DecoderSettings
from app.models.latent import LatentCausalLM, latent_attention

# What all of them say.
_KNOWN = {"router_bias": False, "zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
_NAMES = [
    (r"\.mlp\.router\.classifier\.", ".shortcut.gate."),
    (r"\.mlp\.router\.", ".shortcut.gate."),
    (r"\.mlp\.", ".shortcut."),
    (r"\.mlps\.", ".mlp."),
    (r"\.(self_attn|mlp|input_layernorm|post_attention_layernorm)\.0\.", r".\1."),
    (r"\.(self_attn|mlp|input_layernorm|post_attention_layernorm)\.1\.", r".second.\1."),
]


class LongcatFlashForCausalLM(LatentCausalLM):
    """Runs LongCat-Flash."""

    blocks = Blocks(attention=latent_attention, layer=ShortcutLayer)
    rope_defaults = MappingProxyType({"rope_theta": 10_000_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json: what queries are multiplied by, their scores are here."""
        settings = LatentCausalLM.settings(info)
        latent, eps = settings.latent, float(info.hf_config.get("rms_norm_eps", 1e-5))
        assert latent is not None
        if latent.query_rank is not None:
            latent = replace(latent, scale=latent.scale * (settings.hidden_size / latent.query_rank) ** 0.5)
        return replace(settings, latent=latent, norm_eps=eps, experts=expert_settings(info))

    @classmethod
    def blocks_behind(cls, info: ModelInfo) -> Blocks:
        """See CausalLM: half of a layer."""
        if info.hf_config.get("nextn_use_scmoe"):
            raise UnsupportedError("nextn_use_scmoe=True of config.json is not supported", param="model")
        return replace(cls.blocks, layer=None)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Names of the layer's halves, but of the one half (without experts) that predicts further tokens; the latents'
        norm has what they are multiplied by."""
        assert settings.latent is not None
        expert, experts = re.search(r"\.experts\.(\d+)\.", name), settings.experts
        if name.startswith("model.mtp.") or (expert and experts and int(expert[1]) >= experts.num_experts):
            return []
        if name.endswith(".kv_a_layernorm.weight"):
            scale = (settings.hidden_size / settings.latent.latent_size) ** 0.5
            tensor = computed(tensor, lambda x: x * scale)
        return [(name if experts is None else renamed(name, _NAMES), tensor)]


def expert_settings(info: ModelInfo) -> ExpertSettings:
    """Reads what config.json says of experts. UnsupportedError names what no published model says."""
    hf = info.hf_config
    for name, value in _KNOWN.items():
        if hf.get(name, value) != value:
            raise UnsupportedError(f"{name}={hf[name]!r} of config.json; known: {value!r}", param="model")
    return ExpertSettings(
        num_experts=int(hf.get("n_routed_experts", 512)),
        num_identity=int(hf.get("zero_expert_num", 256) or 0),
        intermediate_size=int(hf.get("expert_ffn_hidden_size", 2048)),
        rule=RoutingRule(
            top_k=int(hf.get("moe_topk", 12)),
            renormalize=bool(hf.get("norm_topk_prob", False)),
            scale=float(hf.get("routed_scaling_factor", 6.0)),
        ),
        layers=frozenset(range(info.num_layers)),
        gate_dtype=torch.float32 if hf.get("router_dtype") == "float32" else None,
        rounds_logits=False,
        corrects=True,
    )
