"""Blocks of models whose layers are of several kinds: which one a layer gets, and how Mamba's tensors become ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import split_rows
from app.errors import UnsupportedError
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext
from app.layers.gated_delta_net import DeltaSettings, GatedDeltaNet
from app.layers.mamba import PARTS as MAMBA_PARTS
from app.layers.mamba2 import Mamba2, Mamba2Settings
from app.models.blocks import LayerPlace
from app.models.decoder_settings import DecoderSettings

Mixer = Callable[[BuildContext, DecoderSettings, LayerPlace], Any]  # keeps the contract of attention (Blocks)
LINEAR, FULL = "linear_attention", "full_attention"
MOST_NUMBERS = 128  # of a head, which kernels hold in registers
_OLDER = {"mamba": LINEAR, "attention": FULL, "linear": LINEAR, "full": FULL}  # names in older configurations


@dataclass(slots=True, frozen=True)
class ByKind:
    """Makes a layer's mixer by its kind."""

    kinds: tuple[str, ...]  # of each layer
    mixers: Mapping[str, Mixer]

    def __call__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> Any:
        """The one of the place."""
        return self.mixers[self.kinds[place.index]](ctx, settings, place)


def kinds_of(info: ModelInfo, default: Sequence[str], known: Iterable[str] = (LINEAR, FULL)) -> tuple[str, ...]:
    """The kind of each layer, as `layer_types` or `layers_block_type` say; UnsupportedError names an unknown one."""
    hf = info.hf_config
    kinds = [
        _OLDER.get(kind, kind) for kind in map(str, hf.get("layer_types") or hf.get("layers_block_type") or default)
    ]
    if unknown := set(kinds) - set(known):
        raise UnsupportedError(f"layer_types: unknown {sorted(unknown)}", param="model")
    if len(kinds) != info.num_layers:
        raise UnsupportedError(f"layer_types names {len(kinds)} of {info.num_layers} layers", param="model")
    return tuple(kinds)


def every_nth_attends(info: ModelInfo, n: int) -> list[str]:
    """Kinds of layers of which every n-th attends, from the n-th on."""
    return [LINEAR if (i + 1) % n else FULL for i in range(info.num_layers)]


def delta_mixer(settings: DeltaSettings) -> Mixer:
    """Makes gated delta nets of this shape."""

    def mixer(ctx: BuildContext, decoder: DecoderSettings, place: LayerPlace) -> AttentionLayer:
        return GatedDeltaNet(ctx, decoder.hidden_size, settings, place.cache_index)

    return mixer


def checked_delta(settings: DeltaSettings, info: ModelInfo) -> DeltaSettings:
    """The settings, if layers can have them; UnsupportedError says what does not fit."""
    keys, values = settings.heads.num_keys, settings.heads.num_values
    if values % keys:
        raise UnsupportedError(
            f"linear_num_value_heads={values} is no multiple of linear_num_key_heads={keys}", param="model"
        )
    act = str(info.hf_config.get("hidden_act", "silu"))
    if act not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act {act!r}: convolutions know silu alone", param="model")
    return settings


def mamba2_mixer(settings: Mamba2Settings) -> Mixer:
    """Makes layers of this shape."""

    def mixer(ctx: BuildContext, decoder: DecoderSettings, place: LayerPlace) -> AttentionLayer:
        return Mamba2(ctx, decoder.hidden_size, settings, place.cache_index)

    return mixer


def mamba2_settings(info: ModelInfo, *, norm_groups: int = 1, **more: Any) -> Mamba2Settings:
    """The shape that `mamba_*` of config.json say, as Bamba and its kin do."""
    hf = info.hf_config
    heads = int(hf.get("mamba_n_heads", 128))
    width = int(hf.get("mamba_d_ssm") or int(hf.get("mamba_expand", 2)) * info.hidden_size)
    head_dim = hf.get("mamba_d_head", "auto")
    head_dim = width // heads if head_dim == "auto" else int(head_dim)
    if head_dim * heads != width:
        raise UnsupportedError(
            f"mamba_n_heads={heads} of mamba_d_head={head_dim} are not {width} channels", param="model"
        )
    settings = {
        "num_heads": heads,
        "head_dim": head_dim,
        "num_groups": int(hf.get("mamba_n_groups", 1)),
        "state_size": int(hf.get("mamba_d_state", 256)),
        "conv_width": int(hf.get("mamba_d_conv", 4)),
        "conv_bias": bool(hf.get("mamba_conv_bias", True)),
        "bias": bool(hf.get("mamba_proj_bias", False)),
        "norm_eps": float(hf.get("rms_norm_eps", 1e-5)),
        "norm_groups": norm_groups,
        "dt_limit": dt_limit(hf.get("time_step_limit")),
    }
    return checked(Mamba2Settings(**{**settings, **more}), info)


def dt_limit(limits: Any) -> tuple[float, float]:
    """Reads `time_step_limit`; for an infinite one, which JSON lacks, transformers writes {"__float__": ...}."""
    least, most = (0.0, "inf") if limits is None else limits
    return _number(least), _number(most)


def _number(value: Any) -> float:
    return float(value["__float__"] if isinstance(value, Mapping) else value)


def checked(settings: Mamba2Settings, info: ModelInfo) -> Mamba2Settings:
    """The settings, if layers can have them; UnsupportedError says what does not fit."""
    if settings.num_heads % settings.num_groups:
        raise UnsupportedError(
            f"{settings.num_heads} heads of state spaces are no multiple of {settings.num_groups} groups", param="model"
        )
    if settings.head_dim > MOST_NUMBERS:
        raise UnsupportedError(
            f"heads of {settings.head_dim} numbers: state spaces have at most {MOST_NUMBERS}", param="model"
        )
    act = str(info.hf_config.get("mamba_hidden_act", info.hf_config.get("hidden_act", "silu")))
    if act not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act {act!r}: convolutions know silu alone", param="model")
    return settings


def mamba2_tensors(settings: Mamba2Settings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
    """A tensor under our names: the fused projection's parts apart."""
    found = re.fullmatch(r"(.*\.)in_proj(\..*)", name)
    if found is None:
        return [(name, tensor)]
    return [(f"{found[1]}{part}{found[2]}", one) for part, one in split_rows(tensor, settings.sizes)]


def mamba_tensors(channels: int, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
    """The same of Mamba 1, whose projection has two parts of as many channels."""
    found = re.fullmatch(r"(.*\.)in_proj(\..*)", name)
    if found is None:
        return [(name, tensor)]
    parts = split_rows(tensor, dict.fromkeys(MAMBA_PARTS, channels))
    return [(f"{found[1]}{part}{found[2]}", one) for part, one in parts]
