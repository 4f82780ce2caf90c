"""K-EXAONE: Exaone 4 with experts chosen as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.errors import UnsupportedError
from app.models.blocks import Blocks
from app.models.decoder_settings import DecoderSettings
from app.models.families.deepseek import layers_with_experts, sigmoid_experts
from app.models.families.exaone4 import Exaone4ForCausalLM

_DEFAULTS = {
    **{"n_routed_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "n_shared_experts": 1},
    **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 1},
}
_OWN = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
_NAMES = [(r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias")]


class ExaoneMoeForCausalLM(Exaone4ForCausalLM):
    """Norms before the blocks, unlike Exaone 4's; what predicts further tokens is left out."""

    blocks = Blocks()

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json, which may name the kind of each layer."""
        hf = {_OWN.get(name, name): value for name, value in info.hf_config.items()}
        experts = sigmoid_experts(replace(info, hf_config=hf), _DEFAULTS)
        if experts is None:
            raise UnsupportedError("num_experts=0: this family has layers with experts", param="model")
        experts = replace(experts, layers=layers_with_experts(info) or experts.layers)
        return replace(Exaone4ForCausalLM.settings(info), experts=experts)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The gate holds its correction."""
        return [] if name.startswith("mtp.") else [(renamed(name, _NAMES), tensor)]
