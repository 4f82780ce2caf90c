"""MiniMax-Text-01 and M1: lightning attention with attention in some layers, experts, and sums of what is normed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import split_heads
from app.errors import UnsupportedError
from app.kernels.gemm import Activations, materialize
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import AddNorm
from app.layers.lightning_attention import PARTS, LightningAttention, LightningSettings
from app.layers.norm import Norm
from app.models.blocks import Blocks, LayerPlace, grouped_query_attention
from app.models.decoder import Ropes
from app.models.decoder_layers.base import DecoderLayer
from app.models.decoder_settings import DecoderSettings
from app.models.families.minimax_m2 import with_rotary_dim
from app.models.families.mixtral import MixtralForCausalLM
from app.models.mixers import FULL, LINEAR, MOST_NUMBERS, ByKind, kinds_of

_TABLES = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # of rates, which transformers saves


@dataclass(slots=True, frozen=True)
class Factors:
    """Numbers by which what a block read (normed), and what it gave, are multiplied before they are added."""

    read: float
    given: float

    @classmethod
    def of(cls, info: ModelInfo, block: str) -> Factors:
        """Those of config.json, which had other names when it was first published."""
        hf = info.hf_config
        older = f"layernorm_{block.replace('attn', 'attention')}"
        read, given = (hf.get(f"{block}_{name}_factor", hf.get(f"{older}_{name}", 1.0)) for name in ("alpha", "beta"))
        return cls(float(read), float(given))


class NormedSumLayer(DecoderLayer):
    """y = norm(x), y a + attention(y) b; then the same with the feed-forward layer."""

    norms = MappingProxyType({"input_layernorm": False, "post_attention_layernorm": False})
    post_attention_layernorm: Norm

    def __init__(
        self,
        ctx: BuildContext,
        settings: DecoderSettings,
        place: LayerPlace,
        blocks: Blocks,
        factors: tuple[Factors, Factors],
    ) -> None:
        super().__init__(ctx, settings, place, blocks)
        self.of_attention, self.of_mlp = factors

    def forward(
        self, normed: Activations, x: Any, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, Any]:
        """See DecoderLayer.forward."""
        read, f = materialize(normed), self.of_attention
        normed, _ = self.self_attn(read, AddNorm(read * f.read, self.post_attention_layernorm, f.given), ctx)
        read, f = materialize(normed), self.of_mlp
        return self.mlp(read, AddNorm(read * f.read, next_norm, f.given), ctx)  # type: ignore[no-any-return]


def _kinds(info: ModelInfo) -> tuple[str, ...]:
    marks = info.hf_config.get("attn_type_list")
    default = [bool(mark) for mark in marks] if marks else [i % 2 == 0 for i in range(info.num_layers)]
    return kinds_of(info, [FULL if attends else LINEAR for attends in default])


def _lightning(info: ModelInfo) -> LightningSettings:
    head_dim = info.head_dim
    if head_dim > MOST_NUMBERS:
        raise UnsupportedError(f"head_dim={head_dim}: lightning attention has at most {MOST_NUMBERS}", param="model")
    return LightningSettings(info.num_heads, head_dim, str(info.hf_config.get("hidden_act", "silu")))


class MiniMaxForCausalLM(MixtralForCausalLM):
    """Reads config.json as transformers writes it (`MiniMaxForCausalLM`), and as it was first published."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        if not hf.get("postnorm", True) or hf.get("shared_intermediate_size"):
            raise UnsupportedError("postnorm: false and shared_intermediate_size are not supported", param="model")
        _kinds(info), _lightning(info)
        return MixtralForCausalLM.settings(info)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        kinds, lightning = _kinds(info), _lightning(info)
        of_mlp = Factors.of(info, "mlp")
        of_kind = {LINEAR: Factors.of(info, "linear_attn"), FULL: Factors.of(info, "full_attn")}

        def mixer(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> AttentionLayer:
            rates = lightning.rates(place.index, settings.num_layers)
            return LightningAttention(ctx, settings.hidden_size, lightning, rates, place.cache_index)

        def layer(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> nn.Module:
            return NormedSumLayer(ctx, settings, place, blocks, (of_kind[kinds[place.index]], of_mlp))

        return Blocks(attention=ByKind(kinds, {LINEAR: mixer, FULL: grouped_query_attention}), layer=layer)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """A part of each head turns where `rotary_dim` says so."""
        return super().ropes(with_rotary_dim(info, settings.head_dim), settings, max_model_len)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Mixtral's names; queries, keys and values of lightning attention apart, which lie head by head; no tables."""
        if name.rpartition(".")[2] in _TABLES:
            return
        for own, one in MixtralForCausalLM.tensors(settings, name, tensor):
            own = own.replace(".output_gate.", ".in_proj_g.")
            head, found, leaf = own.rpartition(".qkv_proj.")
            if not found:
                yield own, one
                continue
            sizes = dict.fromkeys(PARTS[:3], settings.head_dim)
            yield from ((f"{head}.{part}.{leaf}", own) for part, own in split_heads(one, settings.num_heads, sizes))
