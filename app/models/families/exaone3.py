"""Exaone 3 and 3.5, as they were published: Llama under GPT-2's names."""

from __future__ import annotations

from collections.abc import Iterable

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings

_NAMES: list[Rule] = [
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
]


class ExaoneForCausalLM(CausalLM):
    """No biases."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return DecoderSettings.from_info(info, norm_eps=1e-5)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names."""
        return [] if name.endswith(".inv_freq") else [(renamed(name, _NAMES), tensor)]
