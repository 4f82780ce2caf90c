"""What llama.cpp calls the parts of each family, and what it leaves out because its own code knows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.errors import UnsupportedError

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
# Tables of rotary frequencies: `description.py` puts them into config.json.
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(slots=True, frozen=True)
class Architecture:
    """One value of `general.architecture`."""

    model_type: str
    causal_class: str  # what config.json calls the architecture
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    config: Mapping[str, Any] = field(default_factory=dict)  # what holds for all models of it
    pairs: bool = False  # rows of queries and keys lie in the order of rotated pairs
    norm_offset: float = 0.0  # added to norm weights when they were written

    def own_name(self, name: str) -> str:
        """The tensor's name in a checkpoint of transformers; UnsupportedError where the family has no such."""
        module, _, leaf = name.rpartition(".")
        if match := _IN_LAYER.fullmatch(name):
            own = self.layer_names.get(match[2])
            if own is not None:
                return f"model.layers.{match[1]}.{own}.{match[3]}"
        elif module in _OUTSIDE:
            return f"{_OUTSIDE[module]}.{leaf}"
        raise UnsupportedError(f"GGUF: {name} is no tensor of a {self.model_type} model known here", param="model")


_PHI3 = _LAYER | {"ffn_up": "mlp.gate_up_proj"}
_SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", pairs=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "gemma": Architecture("gemma", "GemmaForCausalLM", config=_GEMMA, norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _SANDWICH, _GEMMA | _SOFT_CAPS, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _SANDWICH, _GEMMA, norm_offset=1.0),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3),
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """The architecture of a file; UnsupportedError names one that is not known here."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"GGUF: unknown general.architecture {name!r}; known: {known}", param="model")
    return ARCHITECTURES[name]
