"""Gemma 4's text: heads of two widths, layers that read others' keys and values, experts beside the feed-forward
layer, and embeddings for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed, text_name
from app.checkpoints.tensors.stacked_experts import stacked_parts
from app.checkpoints.tensors.tensor_view import computed
from app.errors import ConfigError, UnsupportedError
from app.kernels.gemm import Activations
from app.kernels.moe import Routing, RoutingRule
from app.layers.activation import activation
from app.layers.attention import Attention
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import PLAIN, AddNorm
from app.layers.experts.expert_mlp import Experts
from app.layers.experts.gate import Gate
from app.layers.experts.settings import ExpertSettings
from app.layers.layer import Layer
from app.layers.linear import ColumnLinear, RowLinear
from app.layers.mlp import GatedMLP
from app.layers.norm import Norm, RMSNorm
from app.layers.rope_scaling import RopeSettings
from app.layers.shared_attention import SharedAttention
from app.layers.weight import REPLICATED, Weight
from app.models.blocks import Blocks, LayerPlace, attention_settings, grouped_query_attention, picture_attention
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_layers.base import DecoderLayer
from app.models.decoder_layers.per_layer_inputs import KEY, PerLayerInputs
from app.models.decoder_settings import DecoderSettings, every_nth_full, layer_types, windows_of

_FULL = "full_attention"
_ELSEWHERE = ("model.embed_vision.", "model.embed_audio.", "model.audio_tower.")  # sees and hears
_NAMES: list[Rule] = [
    (r"^model\.embed_tokens_per_layer\.", "model.layer_inputs.embed_tokens."),
    (r"^model\.per_layer_model_projection\.", "model.layer_inputs.projection."),
    (r"^model\.per_layer_projection_norm\.", "model.layer_inputs.norm."),
    (r"(layers\.\d+)\.router\.proj\.", r"\1.beside.gate."),
    (r"(layers\.\d+)\.router\.scale$", r"\1.beside.gate_norm.weight"),
    (r"(layers\.\d+)\.router\.per_expert_scale$", r"\1.beside.scales"),
    (r"(layers\.\d+)\.experts\.", r"\1.mlp.experts."),
]
_PLACEHOLDERS = {"image": 258_880, "audio": 258_881, "video": 258_884}
_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(slots=True, frozen=True)
class Gemma4Layout:
    """Says what layers are beside what all have in common."""

    kinds: tuple[str, ...]
    full_head_dim: int  # of layers that see everything
    full_kv_heads: int
    keys_are_values: bool  # in these layers
    num_shared: int  # of the last layers, those that read the keys and values of an earlier one of their kind
    shared_mlp: int  # the width of their feed-forward layers
    input_size: int  # of the embedding of each layer; 0: there is none
    input_vocab: int
    whole_pictures: bool = False  # whether tokens of a picture see each other, in layers with a window
    placeholders: tuple[int, ...] = ()  # tokens that stand for what is seen or heard
    padding: int = 0  # the token that layers' own embeddings take for these

    @classmethod
    def of(cls, info: ModelInfo) -> Gemma4Layout:
        """Reads config.json; UnsupportedError names what no layer here can be."""
        hf = info.hf_config
        kinds = layer_types(info, every_nth_full(info, 6))
        kinds[-1] = _FULL
        own = _of_full_layers(hf.get("per_layer_config") or {}, kinds)
        keys_are_values = bool(hf.get("attention_k_eq_v", False))
        kv_heads = hf.get("num_global_key_value_heads") if keys_are_values else None
        shared = int(hf.get("num_kv_shared_layers", 0))
        if not 0 <= shared < info.num_layers or not set(kinds[-shared:] if shared else ()) <= set(kinds[:-shared]):
            raise UnsupportedError(f"num_kv_shared_layers={shared}: no earlier layer of the same kind", param="model")
        if hf.get("use_bidirectional_attention") == "all":
            raise UnsupportedError("use_bidirectional_attention: 'all' is not supported", param="model")
        doubles = bool(hf.get("use_double_wide_mlp", False))
        return cls(
            kinds=tuple(kinds),
            full_head_dim=int(own.get("head_dim") or hf.get("global_head_dim") or 512),
            full_kv_heads=int(own.get("num_key_value_heads") or kv_heads or info.num_kv_heads),
            keys_are_values=keys_are_values,
            num_shared=shared,
            shared_mlp=info.intermediate_size * (2 if doubles else 1),
            input_size=int(hf.get("hidden_size_per_layer_input", 256)),
            input_vocab=int(hf.get("vocab_size_per_layer_input", 262_144)),
            whole_pictures=hf.get("use_bidirectional_attention") == "vision",
            placeholders=tuple(int(hf.get(f"{kind}_token_id") or known) for kind, known in _PLACEHOLDERS.items())
            if isinstance(hf.get("vision_config"), dict)
            else (),
            padding=int(hf.get("pad_token_id") or 0),
        )

    def settings_of(self, index: int, settings: DecoderSettings) -> DecoderSettings:
        """The settings of one layer."""
        if self.kinds[index] == _FULL:
            settings = replace(settings, head_dim=self.full_head_dim, num_kv_heads=self.full_kv_heads)
        return replace(settings, intermediate_size=self.shared_mlp) if self.is_shared(index) else settings

    def is_shared(self, index: int) -> bool:
        """True if the layer reads what an earlier one caches."""
        return index >= len(self.kinds) - self.num_shared


def _of_full_layers(own: Any, kinds: list[str]) -> dict[str, Any]:
    """Reads what transformers writes of each layer that differs: the same for all that see everything, or refused."""
    full = [own[str(i)] for i, kind in enumerate(kinds) if kind == _FULL and str(i) in own]
    if any(one != full[0] for one in full) or len(full) != len(own):
        raise UnsupportedError("per_layer_config: only layers that see everything differ, and alike", param="model")
    return dict(full[0]) if full else {}


@dataclass(slots=True)
class Attentions:
    """Makes each layer's attention, and remembers whose keys and values later ones read."""

    layout: Gemma4Layout
    last: dict[str, Attention] = field(default_factory=dict)  # of each kind

    def __call__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> Any:
        """The one of the place."""
        kind, own = self.layout.kinds[place.index], self.layout.settings_of(place.index, settings)
        if not self.layout.is_shared(place.index):
            whole = self.layout.whole_pictures and kind != _FULL
            made = (picture_attention if whole else grouped_query_attention)(ctx, own, place)
            assert isinstance(made, Attention)
            self.last[kind] = made
            return made
        if kind not in self.last:
            raise ConfigError(
                f"pipeline_parallel_size: layer {place.index} reads keys and values of a layer of another stage "
                f"(num_kv_shared_layers={self.layout.num_shared})",
                param="pipeline_parallel_size",
            )
        return SharedAttention(ctx, attention_settings(own, place), self.last[kind])


class ExpertsBeside(Layer):
    """Experts of what is normed for them; the gate reads the same under a norm of its own, and weighs by a number of
    each expert, too."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings) -> None:
        super().__init__()
        s = settings
        assert s.experts is not None
        self.gate_norm = RMSNorm(ctx, s.hidden_size, s.norm_eps)
        self.gate = Gate(ctx, s.hidden_size, s.experts)
        self.scales = Weight(torch.empty(s.experts.num_experts, dtype=ctx.dtype), REPLICATED)
        self.experts = Experts(ctx, s.hidden_size, s.hidden_act, s.experts, 0)
        self.tp = ctx.groups.tp

    def forward(self, x: torch.Tensor, normed: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """x, and what experts read of it, [T, C] -> their sum [T, C]."""
        chosen = self.gate.choose(self.gate_norm(x), ctx)
        ids = chosen.ids.clamp(0, len(self.scales) - 1).long()  # a warm-up launches no gate, and leaves any numbers
        weights = chosen.weights * self.scales[ids]
        out: torch.Tensor = self.experts(normed, Routing(chosen.ids, weights), ctx).materialize()
        return self.tp.all_reduce(out) if self.tp.size > 1 else out


class LayerInput(Layer):
    """x + norm(projection(act(gate(x)) * the layer's own embedding of the token))."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, size: int, index: int) -> None:
        super().__init__()
        self.gate = ColumnLinear(ctx, settings.hidden_size, size, bias=False)
        self.projection = RowLinear(ctx, size, settings.hidden_size, bias=False)
        self.norm = RMSNorm(ctx, settings.hidden_size, settings.norm_eps)
        self.act, self.index = activation(settings.hidden_act), index
        share = self.gate.output_shares[""]
        self.own = slice(share.start, share.start + share.size)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return x + self.addition(x, ctx)

    def addition(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Returns what is added to x [T, C]."""
        gated = self.act(self.gate(x)) * ctx.memo[KEY][:, self.index, self.own]
        return self.norm(self.projection(gated))  # type: ignore[no-any-return]


class Gemma4Layer(DecoderLayer):
    """x + norm(attention(norm(x))), x + norm(mlp(norm(x))), the layer's own embedding, and a factor."""

    norms = MappingProxyType(
        {
            "input_layernorm": True,
            "post_attention_layernorm": False,
            "pre_feedforward_layernorm": True,
            "post_feedforward_layernorm": False,
        }
    )
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    post_feedforward_layernorm: Norm
    post_feedforward_layernorm_1: Norm  # these three where there are experts
    post_feedforward_layernorm_2: Norm
    pre_feedforward_layernorm_2: Norm

    def __init__(
        self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks, layout: Gemma4Layout
    ) -> None:
        super().__init__(ctx, settings, place, blocks)
        self.layer_scalar = Weight(torch.empty(1, dtype=ctx.dtype), REPLICATED)
        self.beside: ExpertsBeside | None = None
        if settings.experts is not None:
            self.beside = ExpertsBeside(ctx, settings)
            for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
                setattr(self, name, blocks.norm(ctx, settings, False))
        self.layer_input = LayerInput(ctx, settings, layout.input_size, place.index) if layout.input_size else None

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        add = AddNorm(x, self.pre_feedforward_layernorm, first=self.post_attention_layernorm)
        normed, x = self.self_attn(normed, add, ctx)
        add = AddNorm(x, None, first=self.post_feedforward_layernorm)
        if self.beside is None:
            _, x = self.mlp(normed, add, ctx)
        else:
            plain = self.post_feedforward_layernorm_1(self.mlp(normed, PLAIN, ctx))
            chosen = self.beside(x, self.pre_feedforward_layernorm_2(x), ctx)
            _, x = add.after(plain + self.post_feedforward_layernorm_2(chosen))
        x = (x if self.layer_input is None else self.layer_input(x, ctx)) * self.layer_scalar
        return (x if next_norm is None else next_norm(x)), x


def gemma4_settings(info: ModelInfo, kinds: tuple[str, ...]) -> DecoderSettings:
    """The settings of config.json that Gemma 3n and 4 have alike; `kinds`: of their layers."""
    hf = info.hf_config
    settings = DecoderSettings.from_info(info, tied=True, hidden_act="gelu_pytorch_tanh")
    bias = bool(hf.get("attention_bias", False))
    return replace(
        settings,
        head_dim=int(hf.get("head_dim") or 256),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head_rms",
        norms_values=True,
        attention_scale=1.0,
        embedding_scale=settings.hidden_size**0.5,
        sliding_windows=windows_of(info, kinds, 512),
        rope_types=kinds,
    )


class Gemma4ForCausalLM(CausalLM):
    """Norms hold their weights as they are; scores are not scaled; values are normed, too."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        self.layout = Gemma4Layout.of(info)
        super().__init__(ctx, info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf, layout = info.hf_config, Gemma4Layout.of(info)
        experts = _experts(info) if hf.get("enable_moe_block") else None
        soft_cap = hf.get("final_logit_softcapping")
        return replace(gemma4_settings(info, layout.kinds), logit_soft_cap=soft_cap, experts=experts)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        layout = Gemma4Layout.of(info)

        def mlp(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> nn.Module:
            own = layout.settings_of(place.index, settings)
            return GatedMLP(ctx, own.hidden_size, own.intermediate_size, own.hidden_act, bias=False)

        def layer(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> nn.Module:
            return Gemma4Layer(ctx, settings, place, blocks, layout)

        def layer_inputs(ctx: BuildContext, settings: DecoderSettings) -> PerLayerInputs:
            made = PerLayerInputs(ctx, settings, layout.input_vocab, layout.input_size)
            made.placeholders, made.padding = layout.placeholders, layout.padding
            return made

        has_inputs = layout.input_size > 0
        return Blocks(
            attention=Attentions(layout), mlp=mlp, layer=layer, layer_inputs=layer_inputs if has_inputs else None
        )

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """Heads of layers that see everything are of another width."""
        hf, layout = {"rope_parameters": _ROPES, **info.hf_config}, Gemma4Layout.of(info)

        def of(layer_type: str) -> RopeSettings:
            head_dim = layout.full_head_dim if layer_type == _FULL else settings.head_dim
            return RopeSettings.from_hf(hf, head_dim, max_model_len, layer_type)

        return of

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Leaves out what sees and hears, and the keys and values of layers that read others'; keys that are values
        are loaded as both."""
        own = None if name.startswith(_ELSEWHERE) else text_name(name)
        if own is None:
            return
        own = renamed(own, _NAMES)
        parts = stacked_parts(own, tensor) or [(own, tensor)]
        for part, one in parts:
            yield from self._own(part.replace(".mlp.experts.", ".beside.experts."), one)

    def _own(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        layout, pieces = self.layout, name.split(".")
        index = int(pieces[2]) if name.startswith("model.layers.") else 0
        for inner in ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"):
            name = name.replace(f".{inner}.", f".layer_input.{inner.split('_')[-1]}.")
        if pieces[-2:-1] and pieces[-2] in ("k_proj", "v_proj", "k_norm") and layout.is_shared(index):
            return
        if name.endswith(".gate_norm.weight"):
            scale = self.decoder_settings.hidden_size**-0.5
            tensor = computed(tensor, lambda x: x * scale)
        yield name, tensor
        if layout.keys_are_values and layout.kinds[index] == _FULL and pieces[-2:-1] == ["k_proj"]:
            yield name.replace(".k_proj.", ".v_proj."), tensor


def _experts(info: ModelInfo) -> ExpertSettings:
    hf = info.hf_config
    return ExpertSettings(
        num_experts=int(hf["num_experts"]),
        intermediate_size=int(hf["moe_intermediate_size"]),
        rule=RoutingRule(top_k=int(hf["top_k_experts"]), renormalize=True),
        layers=frozenset(range(info.num_layers)),
    )
