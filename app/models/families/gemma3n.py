"""Gemma 3n's text: several streams of hidden states, of which one goes through a layer's blocks (AltUp: Baykal et al.,
2023); low-rank residuals, embeddings for each layer, sparse activations, last layers that read earlier keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import NormalDist
from types import MappingProxyType

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed, text_name
from app.errors import ConfigError, UnsupportedError
from app.kernels.gemm import Activations
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import PLAIN, Epilogue, ResultT
from app.layers.layer import Layer
from app.layers.mlp import GatedMLP
from app.layers.norm import Norm, RMSNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.weight import REPLICATED, Weight
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_layers.base import DecoderLayer
from app.models.decoder_layers.per_layer_inputs import PerLayerInputs
from app.models.decoder_settings import DecoderSettings, every_nth_full, layer_types
from app.models.families.gemma3 import Gemma3ForCausalLM
from app.models.families.gemma4 import Attentions, Gemma4Layout, LayerInput, gemma4_settings

_ELSEWHERE = ("model.embed_vision.", "model.embed_audio.", "model.audio_tower.", "model.vision_tower.")
_NAMES: list[Rule] = [
    (r"^model\.embed_tokens_per_layer\.", "model.layer_inputs.embed_tokens."),
    (r"^model\.per_layer_model_projection\.", "model.layer_inputs.projection."),
    (r"^model\.per_layer_projection_norm\.", "model.layer_inputs.norm."),
    (r"^model\.altup_projections\.", "model.layers.0.expand.products."),
    (r"\.input_layernorm\.", ".first_norm."),
    (r"\.per_layer_input_gate\.", ".layer_input.gate."),
    (r"\.per_layer_projection\.", ".layer_input.projection."),
    (r"\.post_per_layer_input_norm\.", ".layer_input.norm."),
]
_LEAST = 1e-5  # of a mean square that divides


class Streams(Layer):
    """Products of hidden states, made as large as these: of one stream for the others, or of all for one."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, count: int) -> None:
        super().__init__()
        size = settings.hidden_size
        self.products = nn.ModuleList(ReplicatedLinear(ctx, size, size, bias=False) for _ in range(count - 1))

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, N, C]."""
        return self._joined(x, [x] * len(self.products))

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, N, C] -> their mean [T, C]."""
        first, *others = streams.unbind(1)
        return self._joined(first, others).mean(1)

    def _joined(self, first: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        wanted, found = first.square().mean(-1, keepdim=True).sqrt(), [first]
        for product, x in zip(self.products, others, strict=True):
            y = product(x)
            found.append(y * wanted / y.square().mean(-1, keepdim=True).clamp(min=_LEAST).sqrt())
        return torch.stack(found, 1)


class AltUp(Layer):
    """Predicts all streams before a layer's blocks, and corrects them by what these made of the first."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, count: int) -> None:
        super().__init__()
        s = settings
        self.correct_output_scale = Weight(torch.empty(s.hidden_size, dtype=ctx.dtype), REPLICATED)
        self.correction_coefs = ReplicatedLinear(ctx, count, count, bias=False)
        self.prediction_coefs = ReplicatedLinear(ctx, count, count * count, bias=False)
        self.modality_router = ReplicatedLinear(ctx, s.hidden_size, count, bias=False)
        self.router_norm = RMSNorm(ctx, s.hidden_size, s.norm_eps)
        self.count, self.shrink = count, 1.0 / s.hidden_size

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, N, C] -> the same."""
        mixes = self.prediction_coefs(self._routed(streams[:, 0])).view(-1, self.count, self.count)
        return torch.bmm(mixes, streams) + streams

    def correct(self, predicted: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """[T, N, C] and what the blocks made of the first [T, C] -> [T, N, C]."""
        shares: torch.Tensor = self.correction_coefs(self._routed(made)) + 1.0
        return predicted + shares[:, :, None] * (made - predicted[:, 0])[:, None]

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.modality_router(self.router_norm(x) * self.shrink).float()).to(x.dtype)


class Laurel(Layer):
    """x + norm(right(left(x))), a product of low rank."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, rank: int) -> None:
        super().__init__()
        self.linear_left = ReplicatedLinear(ctx, settings.hidden_size, rank, bias=False)
        self.linear_right = ReplicatedLinear(ctx, rank, settings.hidden_size, bias=False)
        self.post_laurel_norm = RMSNorm(ctx, settings.hidden_size, settings.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))  # type: ignore[no-any-return]


class SparseMLP(GatedMLP):
    """Lets of each token's gates only those pass that exceed a share of them, if they were normally distributed."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, sparsity: float) -> None:
        s = settings
        super().__init__(ctx, s.hidden_size, s.intermediate_size, s.hidden_act, bias=False)
        cutoff = NormalDist().inv_cdf(sparsity)
        self.cutoff = float(torch.tensor(cutoff, dtype=ctx.dtype, device="cpu"))
        self.tp, self.width = ctx.groups.tp, s.intermediate_size

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext | None = None) -> ResultT:
        """See GatedMLP.forward."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        mean = self._summed(gate) / self.width
        deviation = (self._summed((gate - mean).square()) / self.width).sqrt()
        kept = torch.relu(gate - (mean + deviation * self.cutoff))
        return self.down_proj(self.act(kept) * up, epilogue)  # type: ignore[no-any-return]

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """Over all ranks' gates."""
        total = x.sum(-1, keepdim=True)
        return self.tp.all_reduce(total) if self.tp.size > 1 else total


class Gemma3nLayer(DecoderLayer):
    """Reads and gives all streams side by side, [T, N C], but for the first layer's input and the last one's output."""

    norms = MappingProxyType(
        {
            "first_norm": False,
            "post_attention_layernorm": False,
            "pre_feedforward_layernorm": True,
            "post_feedforward_layernorm": False,
        }
    )
    first_norm: Norm
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    post_feedforward_layernorm: Norm

    def __init__(
        self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks, info: ModelInfo
    ) -> None:
        super().__init__(ctx, settings, place, blocks)
        hf = info.hf_config
        self.count, self.size = int(hf.get("altup_num_inputs", 4)), settings.hidden_size
        self.altup = AltUp(ctx, settings, self.count)
        self.laurel = Laurel(ctx, settings, int(hf.get("laurel_rank", 64)))
        self.layer_input = LayerInput(ctx, settings, int(hf.get("hidden_size_per_layer_input", 256)), place.index)
        self.scales_first = bool(hf.get("altup_correct_scale", True))
        last = place.index == settings.num_layers - 1
        self.expand = None if place.index else Streams(ctx, settings, self.count)
        self.collapse = Streams(ctx, settings, self.count) if last else None

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        streams = x.view(len(x), self.count, self.size) if self.expand is None else self.expand.expand(x)
        predicted = self.altup.predict(streams)
        first = predicted[:, 0]
        read = self.first_norm(first)
        attended = first + self.post_attention_layernorm(self.self_attn(read, PLAIN, ctx))
        both = (attended + self.laurel(read)) * 2.0**-0.5
        fed = self.mlp(self.pre_feedforward_layernorm(both), PLAIN, ctx)
        corrected = self.altup.correct(predicted, both + self.post_feedforward_layernorm(fed))
        first = corrected[:, 0] * self.altup.correct_output_scale if self.scales_first else corrected[:, 0]
        corrected[:, 1:] += self.layer_input.addition(first, ctx)[:, None]
        if self.collapse is None:
            flat = corrected.view(len(x), -1)
            return flat, flat
        x = self.collapse.collapse(corrected)
        return (x if next_norm is None else next_norm(x)), x


class Gemma3nForCausalLM(Gemma3ForCausalLM):
    """Norms hold their weights as they are; scores are not scaled; values are normed, too."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        if not (ctx.groups.is_first_stage and ctx.groups.is_last_stage):
            raise ConfigError(
                f"pipeline_parallel_size: {info.architecture} runs in one stage", param="pipeline_parallel_size"
            )
        self.layout = _layout(info)
        super().__init__(ctx, info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError where another stream than the first goes through blocks."""
        hf = info.hf_config
        if hf.get("altup_active_idx"):
            raise UnsupportedError(f"altup_active_idx={hf['altup_active_idx']} is not supported", param="model")
        settings = gemma4_settings(info, _layout(info).kinds)
        return replace(settings, logit_soft_cap=hf.get("final_logit_softcapping", 30.0))

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        layout, sparsities = _layout(info), _sparsities(info)

        def mlp(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> nn.Module:
            if sparsities[place.index]:
                return SparseMLP(ctx, settings, sparsities[place.index])
            return GatedMLP(ctx, settings.hidden_size, settings.intermediate_size, settings.hidden_act, bias=False)

        def layer(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> nn.Module:
            return Gemma3nLayer(ctx, settings, place, blocks, info)

        def layer_inputs(ctx: BuildContext, settings: DecoderSettings) -> PerLayerInputs:
            return PerLayerInputs(ctx, settings, layout.input_vocab, layout.input_size)

        return Blocks(attention=Attentions(layout), mlp=mlp, layer=layer, layer_inputs=layer_inputs)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Leaves out what sees and hears, and keys and values of layers that read others'."""
        own = None if name.startswith(_ELSEWHERE) else text_name(name)
        if own is None:
            return []
        last = f"model.layers.{self.decoder_settings.num_layers - 1}.collapse.products."
        own = renamed(own, [*_NAMES, (r"^model\.altup_unembed_projections\.", last)])
        pieces = own.split(".")
        is_cached = pieces[-2:-1] and pieces[-2] in ("k_proj", "v_proj", "k_norm")
        return [] if is_cached and self.layout.is_shared(int(pieces[2])) else [(own, tensor)]


def _layout(info: ModelInfo) -> Gemma4Layout:
    hf = info.hf_config
    kinds = layer_types(info, every_nth_full(info, 5))
    shared = int(hf.get("num_kv_shared_layers", 15))
    if not 0 <= shared < info.num_layers or not set(kinds[-shared:] if shared else ()) <= set(kinds[:-shared]):
        raise UnsupportedError(f"num_kv_shared_layers={shared}: no earlier layer of the same kind", param="model")
    return Gemma4Layout(
        kinds=tuple(kinds),
        full_head_dim=int(hf.get("head_dim") or 256),
        full_kv_heads=info.num_kv_heads,
        keys_are_values=False,
        num_shared=shared,
        shared_mlp=info.intermediate_size,
        input_size=int(hf.get("hidden_size_per_layer_input", 256)),
        input_vocab=int(hf.get("vocab_size_per_layer_input", 262_144)),
    )


def _sparsities(info: ModelInfo) -> list[float]:
    """Shares of gates that do not pass, layer by layer; UnsupportedError where there is none for each, or all are."""
    sparse = 10 if info.num_layers > 10 else 0
    given = info.hf_config.get("activation_sparsity_pattern", [0.95] * sparse + [0.0] * (info.num_layers - sparse))
    found = [float(given)] * info.num_layers if isinstance(given, int | float) else [float(one) for one in given]
    if len(found) != info.num_layers or not all(0 <= one < 1 for one in found):
        raise UnsupportedError(f"activation_sparsity_pattern={given!r:.80} of {info.num_layers} layers", param="model")
    return found
