"""The families whose GGUF files are read, by llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoints.gguf.architecture import LAYER, Architecture
from app.checkpoints.gguf.conv_families import CONV_FAMILIES
from app.checkpoints.gguf.delta_families import DELTA_FAMILIES
from app.checkpoints.gguf.expert_families import EXPERT_FAMILIES, MIXTRAL, MULTIPLIERS
from app.checkpoints.gguf.latent_delta import KIMI_LINEAR
from app.checkpoints.gguf.mamba_families import FALCON_MAMBA, MAMBA_FAMILIES
from app.checkpoints.gguf.space_families import SPACE_FAMILIES
from app.errors import UnsupportedError

_SANDWICH = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
_PHI3 = LAYER | {"ffn_up": "mlp.gate_up_proj"}
_SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
# Tables of rotary frequencies: `description.py` puts them into config.json.
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "gemma": Architecture("gemma", "GemmaForCausalLM", config=_GEMMA, norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _SANDWICH, _GEMMA | _SOFT_CAPS, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _SANDWICH, _GEMMA, norm_offset=1.0),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3),
    "granite": Architecture("granite", "GraniteForCausalLM", numbers=MULTIPLIERS, pairs=True),
    **EXPERT_FAMILIES,
    **DELTA_FAMILIES,
    **CONV_FAMILIES,
    **SPACE_FAMILIES,
    **MAMBA_FAMILIES,
    "kimi-linear": KIMI_LINEAR,
}
# Two families under one name: a key that the second has.
_OTHERS = (("llama", "expert_count", MIXTRAL), ("mamba", "ssm.dt_b_c_rms", FALCON_MAMBA))


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """The architecture of a file; UnsupportedError names one that is not known here."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"GGUF: unknown general.architecture {name!r}; known: {known}", param="model")
    for shared, key, other in _OTHERS:
        if name == shared and metadata.get(f"{name}.{key}"):
            return other
    return ARCHITECTURES[name]
