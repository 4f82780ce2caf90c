"""DBRX: layer norms without bias, clipped queries, keys and values, experts in three tensors a layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.stacked_experts import Cuts, transposed_cuts, unstacked
from app.checkpoints.tensors.tensor_view import split_rows
from app.errors import UnsupportedError
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.blocks import Blocks, unbiased_layer_norm
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings

_NAMES: list[Rule] = [
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.norm_f\.", "model.norm."),
    (r"^transformer\.blocks\.", "model.layers."),
    (r"\.norm_attn_norm\.norm_1\.", ".input_layernorm."),
    (r"\.norm_attn_norm\.norm_2\.", ".post_attention_layernorm."),
    (r"\.norm_attn_norm\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.norm_attn_norm\.attn\.", ".self_attn."),
    (r"\.ffn\.router\.layer\.", ".mlp.gate."),
    (r"\.ffn\.experts\.mlp\.", ".mlp.experts."),
]
# [E * I, C] each, of down the other way round.
_STACKED: dict[str, Cuts] = {
    "w1": {"gate_proj": lambda x: x},
    "v1": {"up_proj": lambda x: x},
    "w2": transposed_cuts({"down_proj": lambda x: x}),
}


class DbrxForCausalLM(CausalLM):
    """Softmax over all experts, the best ones' weights made to sum to 1."""

    blocks = Blocks(norm=unbiased_layer_norm)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError for weights that are normed otherwise."""
        hf = info.hf_config
        power = hf["ffn_config"].get("moe_normalize_expert_weights", 1.0)
        if power not in (None, 1):
            raise UnsupportedError(f"moe_normalize_expert_weights={power} of config.json; known: 1", param="model")
        experts = ExpertSettings(
            num_experts=int(hf.get("moe_num_experts", 4)),
            intermediate_size=info.intermediate_size,
            rule=RoutingRule(int(hf.get("moe_top_k", 1)), renormalize=power is not None),
            layers=frozenset(range(info.num_layers)),
            rounds_weights=True,
        )
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            hidden_act=str((hf.get("ffn_act_fn") or {}).get("name", "silu")),
            attention_clip=float(hf["clip_qkv"]) if hf.get("clip_qkv") is not None else None,
            experts=experts,
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names; queries, keys and values lie in one tensor, all experts' gates, ups and downs in one each."""
        own = renamed(name, _NAMES)
        head, _, stacked = own.rpartition(".mlp.experts.")
        if stacked in _STACKED and settings.experts is not None:
            whole = tensor.reshaped(settings.experts.num_experts, -1, settings.hidden_size)
            return unstacked(f"{head}.mlp.experts", "weight", whole, _STACKED[stacked])
        head, found, leaf = own.rpartition(".Wqkv.")
        if not found:
            return [(own, tensor)]
        width = settings.num_kv_heads * settings.head_dim
        sizes = {"q_proj": settings.num_heads * settings.head_dim, "k_proj": width, "v_proj": width}
        return [(f"{head}.{part}.{leaf}", one) for part, one in split_rows(tensor, sizes)]
