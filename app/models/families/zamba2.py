"""Zamba 2 (Glorioso et al., 2024): layers of Mamba 2, before some of which one of a few blocks of attention and
feed-forward layer stands, which these layers share; each has products of low rank of its own beside the shared ones.

A shared block reads the hidden states beside the tokens' embeddings, and what it gives is added to what Mamba reads,
not to the hidden states.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.tensor_view import split_rows
from app.errors import ConfigError, UnsupportedError
from app.kernels.gemm import Activations, materialize
from app.layers.attention import Attention, AttentionSettings
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import PLAIN, AddNorm, Epilogue, ResultT
from app.layers.layer import Layer
from app.layers.linear import MergedColumnLinear
from app.layers.mamba2 import Mamba2, Mamba2Settings
from app.layers.mlp import GatedMLP
from app.layers.norm import Norm, RMSNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.rotary import RotaryEmbedding
from app.models.blocks import Blocks, LayerPlace, attention_settings
from app.models.decoder import CausalLM
from app.models.decoder_layers.one_block import OneBlockLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.layer_offload import LayerOffload
from app.models.mixers import LINEAR, checked, kinds_of, mamba2_mixer, mamba2_tensors

HYBRID = "hybrid"
EMBEDDED = "zamba2_embeddings"  # in ForwardContext.memo: [T, C]
_MAMBA: list[Rule] = [
    (r"(layers\.\d+)\.mamba_decoder\.input_layernorm\.", r"\1.mamba_norm."),
    (r"(layers\.\d+)\.mamba_decoder\.mamba\.", r"\1.mixer."),
    (r"(layers\.\d+)\.mamba\.", r"\1.mixer."),
    (r"^model\.final_layernorm\.", "model.norm."),
]
_SHARED: list[Rule] = [
    (r"^input_layernorm\.", "attention_norm."),
    (r"^pre_ff_layernorm\.", "mlp_norm."),
    (r"^feed_forward\.", "mlp."),
]
_ADAPTER = re.compile(r"(?:self_attn\.linear_([qkv])|feed_forward\.gate_up_proj)_adapter_list\.(\d+)\.([01])\.(\w+)")


@dataclass(slots=True, frozen=True)
class Shape:
    """The layers beside what DecoderSettings say."""

    kinds: tuple[str, ...]
    num_blocks: int  # that layers share, taken in turns
    rank: int  # of a layer's own products
    adapts_attention: bool  # or its feed-forward layer alone
    mamba: Mamba2Settings

    @classmethod
    def of(cls, info: ModelInfo) -> Shape:
        """Read from config.json; UnsupportedError names what does not fit."""
        hf = info.hf_config
        heads, width = int(hf.get("n_mamba_heads", 8)), int(hf.get("mamba_expand", 2)) * info.hidden_size
        groups = int(hf.get("mamba_ngroups", 1))
        if width % heads:
            raise UnsupportedError(f"n_mamba_heads={heads} do not divide {width} channels", param="model")
        settings = Mamba2Settings(
            num_heads=heads,
            head_dim=width // heads,
            num_groups=groups,
            state_size=int(hf.get("mamba_d_state", 64)),
            conv_width=int(hf.get("mamba_d_conv", 4)),
            conv_bias=True,
            bias=bool(hf.get("add_bias_linear", False)),
            norm_eps=1e-5,
            norm_groups=groups,
            dt_limit=(float(hf.get("time_step_min", 0.001)), float("inf")),
        )
        shape = cls(
            kinds=kinds_of(info, (), (LINEAR, HYBRID)),
            num_blocks=int(hf.get("num_mem_blocks", 1)),
            rank=int(hf.get("adapter_rank", 128)),
            adapts_attention=bool(hf.get("use_shared_attention_adapter", False)),
            # What hidden_act says is the feed-forward layer's.
            mamba=checked(settings, replace(info, hf_config={**hf, "mamba_hidden_act": "silu"})),
        )
        if not hf.get("tie_word_embeddings", True):
            raise UnsupportedError("tie_word_embeddings: false, where blocks are not shared either", param="model")
        if shape.adapts_attention and info.num_heads != info.num_kv_heads:
            raise UnsupportedError("use_shared_attention_adapter: fewer heads of keys than of queries", param="model")
        return shape

    @property
    def hybrid(self) -> list[int]:
        """The layers before which a shared block stands."""
        return [index for index, kind in enumerate(self.kinds) if kind == HYBRID]

    def users(self, block: int) -> list[int]:
        """The layers that share a block."""
        return self.hybrid[block :: self.num_blocks]


class Adapter(Layer):
    """up(down(x)): a product of low rank, of several outputs."""

    def __init__(self, ctx: BuildContext, input_size: int, rank: int, outputs: dict[str, int]) -> None:
        super().__init__()
        self.down = ReplicatedLinear(ctx, input_size, rank, bias=False)
        self.up = MergedColumnLinear(ctx, rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, input_size] -> [T, outputs]."""
        return self.up(self.down(x))  # type: ignore[no-any-return]


class AdaptedAttention(Attention):
    """Attention over shared products."""

    def __init__(
        self, ctx: BuildContext, settings: AttentionSettings, layer_index: int, rotary: RotaryEmbedding
    ) -> None:
        super().__init__(ctx, settings, layer_index, rotary)
        self.adapters: nn.ModuleDict | None = None

    def adapt(self, ctx: BuildContext, width: int, rank: int, size: int) -> None:
        """Give queries, keys and values products of this layer's own."""
        self.adapters = nn.ModuleDict({part: Adapter(ctx, width, rank, {"adapter": size}) for part in "qkv"})

    def project(self, x: Activations) -> torch.Tensor:
        """See Attention.project."""
        x = materialize(x)
        projected = super().project(x)
        if self.adapters is None:
            return projected
        return projected + torch.cat([adapter(x) for adapter in self.adapters.values()], dim=1)


class AdaptedMLP(GatedMLP):
    """A feed-forward layer of shared products and one of this layer's own."""

    def adapt(self, ctx: BuildContext, hidden_size: int, rank: int, size: int) -> None:
        """Give gate and up that product."""
        self.adapter = Adapter(ctx, hidden_size, rank, {"gate_up": size, "up_up": size})

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext | None = None) -> ResultT:
        """See GatedMLP.forward."""
        x = materialize(x)
        gate, up = (self.gate_up_proj(x) + self.adapter(x)).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up, epilogue)  # type: ignore[no-any-return]


class Embedded(Layer):
    """Keeps the tokens' embeddings for shared blocks; sums of hidden states are made in place."""

    key = EMBEDDED

    def __init__(self, ctx: BuildContext, settings: DecoderSettings) -> None:
        super().__init__()

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """int [T] and their embeddings [T, C] -> these."""
        return embedded.clone()


class HybridLayer(Layer):
    """x + mamba(norm(x + linear(block(x, embeddings))))."""

    def __init__(
        self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, shape: Shape, first: HybridLayer | None
    ) -> None:
        """`first`: of this stage's layers, the one whose block it shares."""
        super().__init__()
        s, size = settings, settings.hidden_size
        self.input_layernorm: Norm | None = None
        wide = replace(attention_settings(s, place), input_size=2 * size)
        self.self_attn = AdaptedAttention(ctx, wide, place.cache_index, place.rotary)
        self.mlp = AdaptedMLP(ctx, size, s.intermediate_size, s.hidden_act, s.mlp_bias)
        if first is None:
            self.attention_norm = RMSNorm(ctx, 2 * size, s.norm_eps)
            self.mlp_norm = RMSNorm(ctx, size, s.norm_eps)
        else:
            self.attention_norm, self.mlp_norm = first.attention_norm, first.mlp_norm
            self.self_attn.qkv_proj, self.self_attn.o_proj = first.self_attn.qkv_proj, first.self_attn.o_proj
            self.mlp.gate_up_proj, self.mlp.down_proj = first.mlp.gate_up_proj, first.mlp.down_proj
        if shape.adapts_attention:
            self.self_attn.adapt(ctx, 2 * size, shape.rank, s.num_heads * s.head_dim)
        self.mlp.adapt(ctx, size, shape.rank, s.intermediate_size)
        self.linear = ReplicatedLinear(ctx, size, size, bias=False)
        self.mamba_norm = RMSNorm(ctx, size, s.norm_eps)
        self.mixer = Mamba2(ctx, size, shape.mamba, place.cache_index)

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """See DecoderLayer.forward."""
        read = self.attention_norm(torch.cat((x, ctx.memo[EMBEDDED]), dim=1))
        attended: torch.Tensor = self.self_attn(read, PLAIN, ctx)
        given = self.linear(self.mlp(self.mlp_norm(attended), PLAIN, ctx))
        return self.mixer(self.mamba_norm(x + given), AddNorm(x, next_norm), ctx)  # type: ignore[no-any-return]


@dataclass(slots=True)
class Layers:
    """Makes the layers of one stage."""

    shape: Shape
    _first: dict[int, HybridLayer] = field(default_factory=dict)  # by block

    def __call__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> nn.Module:
        """The layer of the place."""
        shape = self.shape
        if shape.kinds[place.index] != HYBRID:
            return OneBlockLayer(ctx, settings, place, blocks)
        block = shape.hybrid.index(place.index) % shape.num_blocks
        layer = HybridLayer(ctx, settings, place, shape, self._first.get(block))
        self._first.setdefault(block, layer)
        return layer


class Zamba2ForCausalLM(CausalLM):
    """Heads as wide as hidden states and embeddings beside each other, whose scores are scaled as of half of that."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        self.shape, self.stage_layers = Shape.of(info), ctx.stage_layers
        super().__init__(ctx, info)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        Shape.of(info)
        settings = DecoderSettings.from_info(info, tied=True, hidden_act="gelu", norm_eps=1e-5)
        head_dim = 2 * info.hidden_size // info.num_heads
        return replace(
            settings,
            head_dim=head_dim,
            attention_scale=(head_dim / 2) ** -0.5,
            mlp_bias=bool(hf.get("add_bias_linear", False)),
            rope_types=() if hf.get("use_mem_rope", False) else (NO_ROPE,) * info.num_layers,
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        shape = Shape.of(info)
        return Blocks(attention=mamba2_mixer(shape.mamba), layer=Layers(shape), layer_inputs=Embedded)

    def offload_layers(self, num_bytes: int, device: torch.device) -> LayerOffload:
        """See EngineModel.offload_layers; a shared block is no single layer's."""
        raise ConfigError("cpu_offload_gb: layers of Zamba 2 share blocks, which stay", param="cpu_offload_gb")

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names; a shared block's tensors are those of the first of this stage's layers that share it."""
        found = re.fullmatch(r"(model\.layers\.)(\d+)\.shared_transformer\.(.*)", name)
        if found is None:
            return mamba2_tensors(self.shape.mamba, renamed(name, _MAMBA), tensor)
        hybrid, index = self.shape.hybrid, int(found[2])
        users = self.shape.users(hybrid.index(index) % self.shape.num_blocks) if index in hybrid else []
        if users[:1] != [index]:  # the same once more
            return []
        adapter = _ADAPTER.fullmatch(found[3])
        if adapter is not None:
            return self._of_adapter(found[1], adapter, tensor)
        own = [user for user in users if self.stage_layers is None or user in self.stage_layers]
        # Every stage's names are looked for: those of the whole model, and its own.
        prefixes = [f"{found[1]}{user}." for user in dict.fromkeys([users[0], *own[:1]])]
        pieces = self._of_block(renamed(found[3], _SHARED), tensor)
        return [(prefix + piece, part) for prefix in prefixes for piece, part in pieces]

    def _of_block(self, name: str, tensor: StoredTensor) -> list[tuple[str, StoredTensor]]:
        """A tensor of a shared block, or the parts of its fused one."""
        parts = re.fullmatch(r"mlp\.gate_up_proj\.(.*)", name)
        if parts is None:
            return [(name, tensor)]
        size = self.decoder_settings.intermediate_size
        halves = split_rows(tensor, {"gate_proj": size, "up_proj": size})
        return [(f"mlp.{part}.{parts[1]}", half) for part, half in halves]

    def _of_adapter(
        self, layers: str, found: re.Match[str], tensor: StoredTensor
    ) -> Iterable[tuple[str, StoredTensor]]:
        """A tensor of one layer's own products."""
        hybrid, number = self.shape.hybrid, int(found[2])
        if number >= len(hybrid):
            return []
        prefix = f"{layers}{hybrid[number]}."
        prefix += f"self_attn.adapters.{found[1]}." if found[1] else "mlp.adapter."
        if found[3] == "0":
            return [(f"{prefix}down.{found[4]}", tensor)]
        if found[1]:
            return [(f"{prefix}up.{found[4]}", tensor)]
        size = self.decoder_settings.intermediate_size
        halves = split_rows(tensor, {"gate_up": size, "up_up": size})
        return [(f"{prefix}{part}.{found[4]}", half) for part, half in halves]
