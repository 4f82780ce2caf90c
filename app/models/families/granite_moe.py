"""Granite with experts, and with a feed-forward layer beside them that every token goes through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.stacked_experts import DOWN, HALVES, unstacked
from app.checkpoints.tensors.tensor_view import split_rows
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.families.granite import GraniteForCausalLM

_NAMES: list[Rule] = [
    (r"\.block_sparse_moe\.router\.layer\.", ".mlp.gate."),
    (r"\.block_sparse_moe\.input_linear\.", ".mlp.experts.gate_up_proj."),
    (r"\.block_sparse_moe\.output_linear\.", ".mlp.experts.down_proj."),
    (r"\.shared_mlp\.input_linear\.", ".mlp.shared_experts.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_experts.down_proj."),
]


class GraniteMoeForCausalLM(CausalLM):
    """Granite 3 with experts: softmax over the logits of those that are chosen."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        experts = ExpertSettings(
            num_experts=int(hf.get("num_local_experts", 8)),
            intermediate_size=info.intermediate_size,
            rule=RoutingRule(top_k=int(hf.get("num_experts_per_tok", 2)), scoring="softmax_of_chosen"),
            layers=frozenset(range(info.num_layers)),
            rounds_weights=True,
            shared_size=int(hf.get("shared_intermediate_size", 0)),
        )
        return replace(GraniteForCausalLM.settings(info), mlp_bias=False, experts=experts)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names; all experts are stored in one tensor, gate and up in one."""
        name = renamed(name, _NAMES)
        for part, cuts in (("gate_up_proj", HALVES), ("down_proj", DOWN)):
            head, found, leaf = name.rpartition(f".mlp.experts.{part}.")
            if found:
                return unstacked(f"{head}.mlp.experts", leaf, tensor, cuts)
        head, found, leaf = name.rpartition(".gate_up_proj.")
        if not found or settings.experts is None:
            return [(name, tensor)]
        sizes = dict.fromkeys(("gate_proj", "up_proj"), settings.experts.shared_size)
        return [(f"{head}.{part}.{leaf}", one) for part, one in split_rows(tensor, sizes)]
