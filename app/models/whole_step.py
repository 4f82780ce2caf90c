"""A decoder's layers in one launch, where a step's few rows bring a token each and the layers are plain
(`kernels/whole_step`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.gemm.tiled import TiledWeight
from app.kernels.moe.stacked import StackedExperts
from app.kernels.whole_step import WHOLE_STEPS, StepBiases, StepLayer, StepShape, StepToken, StepWeight, WholeStep
from app.layers.attention import Attention
from app.layers.context import BuildContext, ForwardContext
from app.layers.experts.expert_linear import ExpertLinear
from app.layers.experts.expert_mlp import ExpertMLP
from app.layers.linear import Linear
from app.layers.mlp import GatedMLP
from app.layers.norm import RMSNorm
from app.layers.rotary import RotaryEmbedding
from app.layers.shown import Shown
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.decoder_settings import DecoderSettings
from app.models.step_experts import is_adapted, step_experts
from app.platforms import platform_of


class DecoderStep:
    """Runs steps of one token a row, of which nobody wants more than what the last layer gives."""

    def __init__(self, step: WholeStep, layers: Sequence[PreNormLayer], rotary: RotaryEmbedding) -> None:
        self._step, self._layers, self._rotary = step, layers, rotary
        attention: Any = layers[0].self_attn
        self._attention: Attention = attention  # the first; the others keep blocks in the same group

    @classmethod
    def of(
        cls, ctx: BuildContext, settings: DecoderSettings, layers: Sequence[Any], rotaries: Sequence[RotaryEmbedding]
    ) -> DecoderStep | None:
        """None: these layers, or this device, want launches of their own."""
        if not may_be_whole(ctx, settings, layers, rotaries) or not all(
            _is_plain(one, settings, ctx) for one in layers
        ):
            return None
        s, first = settings, layers[0].self_attn
        if rotaries[0].cos.shape[-1] != first.head_dim:  # some numbers of a head are not rotated
            return None
        experts, *others = {step_experts(layer.mlp, ctx) for layer in layers}
        if others:  # some layers have experts, or other ones
            return None
        biases, sinks, windows = (
            _alike(found(one) for one in layers) for found in (_has_biases, _has_sinks, _has_window)
        )
        if biases is None or sinks is None:  # some products have one, or some layers' heads
            return None
        width = s.intermediate_size if experts is None or s.experts is None else s.experts.intermediate_size
        shape = StepShape(
            s.hidden_size, s.num_heads, s.num_kv_heads, first.head_dim, width, s.norm_eps, first.scale,
            first.q_norm is not None, experts, biases, sinks, windows is not False,
        )  # fmt: skip
        steps = (make(shape, ctx.device) for make in WHOLE_STEPS.all_on(ctx.device))
        step = next((one for one in steps if one is not None), None)
        return None if step is None else cls(step, layers, rotaries[0])

    def longest(self, rows: int) -> int | None:
        """See EngineModel.longest_at_once."""
        weight = None if any(map(_is_changed, self._layers)) else _weight(next(_linears(self._layers[0])))
        return 0 if weight is None else self._step.longest_with(weight, rows)

    def run(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor | None:
        """x [rows, C], which may be overwritten -> what the last layer gives; None: the step is not such a one."""
        meta = ctx.attention[self._attention.layer_index]
        if not are_decodes(x, meta, ctx) or is_long(meta, self.longest(len(x))):
            return None
        rotation = self._rotary.of_step(ctx)
        if rotation.query_scale is not None:
            return None
        places = [layer.self_attn.layer_index for layer in self._layers]
        tables = [(ctx.attention[place].slot_mapping, ctx.attention[place].block_table) for place in places]
        groups = {table.data_ptr(): (slots, table) for slots, table in tables}  # the first layer's come first
        numbers = list(groups)
        more = tuple(groups.values())[1:]
        token = StepToken(rotation.cos, rotation.sin, meta.slot_mapping, meta.seq_lens, meta.block_table, more)
        layers = [
            _tensors(layer, ctx.kv_caches[place], numbers.index(table.data_ptr()))
            for layer, place, (_, table) in zip(self._layers, places, tables, strict=True)
        ]
        return self._step.run(x, layers, token)


def may_be_whole(
    ctx: BuildContext, settings: DecoderSettings, layers: Sequence[Any], rotaries: Sequence[RotaryEmbedding]
) -> bool:
    """True if all layers are here, in bf16, and nothing was asked for that a whole step does not do."""
    is_whole = len(layers) == settings.num_layers and len(rotaries) == 1 and ctx.groups.tp.size == 1
    is_plain = ctx.dtype == torch.bfloat16 and ctx.kv_dtype in (None, ctx.dtype) and not ctx.is_exact
    # Another backend may be asked to attend.
    is_usual = ctx.attention_ops.name == platform_of(ctx.device).attention_backend
    return ctx.whole_steps and is_whole and is_plain and is_usual and not ctx.offload_bytes


def are_decodes(x: torch.Tensor, meta: AttentionMetadata, ctx: ForwardContext) -> bool:
    """True if each row of a step brings one token, of which nobody wants more than what the last layer gives."""
    are_single = len(x) == meta.num_decodes and meta.max_query_len == 1 and not meta.holds_prompts and not meta.cascade
    return are_single and not ctx.wanted and ctx.read is None and not Shown.of(ctx).num_deep


def is_long(meta: AttentionMetadata, longest: int | None) -> bool:
    """True if a layer after the other is quicker: where a context has more than `longest` tokens. Of a static step the
    bound of its lengths tells nothing, and whoever chose the step knew."""
    if meta.by_layers or meta.is_static or longest == 0:
        return meta.by_layers or longest == 0
    return longest is not None and meta.max_seq_len > longest


def _is_changed(layer: PreNormLayer) -> bool:
    """True if adapters may add to it, or its weights are stored otherwise."""
    linears = _linears(layer)
    return is_adapted(layer.mlp) or any(_weight(one) is None or one.delta is not None for one in linears)


def _is_plain(layer: Any, settings: DecoderSettings, ctx: BuildContext) -> bool:
    """True if a layer is Llama's or Qwen3's, with experts or none, without what some of their kin add."""
    if type(layer) is not PreNormLayer:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    is_of_kind = type(attention) is Attention and (type(mlp) is GatedMLP or step_experts(mlp, ctx))
    if not is_of_kind or layer.scale != 1.0 or settings.hidden_act not in ("silu", "swish"):
        return False
    norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [] if attention.q_norm is None else [attention.q_norm, attention.k_norm]
    wants = (attention.soft_cap, attention.slopes, attention.clip, attention.value_eps)
    return (
        all(type(norm) is RMSNorm and norm.eps == settings.norm_eps for norm in norms)
        and all(want is None for want in wants)
        and not attention.gates_output
        and not any(linear.is_streamed for linear in _linears(layer))
    )


def _alike(found: Iterable[bool | None]) -> bool | None:
    """Returns what all of them are; None: they are not alike."""
    first, *others = set(found)
    return None if others else first


def _has_biases(layer: PreNormLayer) -> bool | None:
    """None: some of its products have one."""
    gate: Any = layer.mlp.gate if isinstance(layer.mlp, ExpertMLP) else None
    products = [*_linears(layer), *([] if gate is None else [gate])]
    return _alike(product.bias is not None for product in products)


def _has_sinks(layer: Any) -> bool:
    return layer.self_attn.sinks is not None


def _has_window(layer: Any) -> bool:
    return layer.self_attn.sliding_window is not None


def _linears(layer: PreNormLayer) -> Iterator[Linear | ExpertLinear]:
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp.experts if isinstance(layer.mlp, ExpertMLP) else layer.mlp
    yield from (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)


def _weight(linear: Linear | ExpertLinear) -> StepWeight | None:
    """Returns what a product reads; None: a whole step does not know it."""
    packed = linear.packed
    if packed is None:
        return linear.weight
    if isinstance(packed, StackedExperts):
        return packed if isinstance(packed.packed, TiledWeight) and packed.packed.keeps_inputs else None
    return packed.stored if isinstance(packed, TiledWeight) and packed.keeps_inputs else None


def _tensors(layer: PreNormLayer, cache: torch.Tensor, group: int) -> StepLayer:
    qkv, output, gate_up, down = (weight for linear in _linears(layer) if (weight := _weight(linear)) is not None)
    attention: Any = layer.self_attn
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    assert first is not None
    query, key = (None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
    router = layer.mlp.gate.multiplier if isinstance(layer.mlp, ExpertMLP) else None
    return StepLayer(
        first.weight, qkv, query, key, output, second.weight, gate_up, down, cache, router, _biases(layer),
        attention.sinks, attention.sliding_window, group,
    )  # fmt: skip


def _biases(layer: PreNormLayer) -> StepBiases | None:
    if not isinstance(layer.mlp, ExpertMLP) or layer.mlp.gate.bias is None:
        return None
    qkv, output, gate_up, down = (bias for linear in _linears(layer) if (bias := linear.bias) is not None)
    return StepBiases(qkv, output, layer.mlp.gate.bias, gate_up, down)
