"""Says what a decoder-only model is, independent of the family: filled from config.json by each family's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:  # the settings alone need no torch
    from app.layers.experts.settings import ExpertSettings
    from app.layers.latent_attention import LatentSettings
    from app.layers.query_key_norm import QueryKeyNorm


NO_ROPE = "none"
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_ACT = ("hidden_activation", "hidden_act", "activation_function", "activation")
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(slots=True, frozen=True)
class DecoderSettings:
    """Sizes and switches of a decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]  # one for each layer
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QueryKeyNorm | None = None
    norms_values: bool = False  # of heads, without weights
    attention_scale: float | None = None  # of the scores; None: head_dim^-0.5
    attention_soft_cap: float | None = None
    attention_clip: float | None = None  # of queries, keys and values, which are not normed by heads then
    alibi_slopes: tuple[float, ...] = ()  # one for each head; (): no ALiBi
    attention_gates: bool = False  # what heads give is multiplied by the sigmoid of a further projection
    attention_sinks: bool = False  # one for each head, in the checkpoint
    # The layer type whose rope parameters a layer takes, NO_ROPE for none at all; (): all layers take the common ones.
    rope_types: tuple[str, ...] = ()
    num_positions: int = 0  # rows of the table of positions, which are added to embeddings; 0: there is none
    position_offset: int = 0  # the row of position 0
    embedding_size: int | None = None  # of the token table, where it is not the hidden size
    embedding_scale: float = 1.0
    norms_embeddings: bool = False  # before the first layer, positions included
    residual_scale: float = 1.0  # of what a block adds
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    head_bias: bool = False
    final_norm: bool = True
    norms_sums: bool = False  # layers norm their sums, not what their blocks read
    cross_positions: int = 0  # most of an encoder's output that layers attend to; 0: there is no encoder
    rotary_dim: int = 0  # of a head's dimensions, those that rotate, where the family must know
    experts: ExpertSettings | None = None  # in the layers that it names, instead of one feed-forward layer
    latent: LatentSettings | None = None  # of latent attention; None: keys and values of heads are cached

    @classmethod
    def from_info(
        cls, info: ModelInfo, *, tied: bool = False, hidden_act: str = "silu", norm_eps: float = 1e-6
    ) -> DecoderSettings:
        """The part of config.json that all families read alike, with a family's defaults for what it may leave out.

        UnsupportedError for numbers that do not fit.
        """
        hf = info.hf_config
        if info.num_heads % info.num_kv_heads != 0:
            raise UnsupportedError(
                f"num_attention_heads={info.num_heads} is no multiple of num_key_value_heads={info.num_kv_heads}",
                param="model",
            )
        return cls(
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            intermediate_size=info.intermediate_size,
            num_layers=info.num_layers,
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            norm_eps=float(_first(hf, _EPS, norm_eps)),
            hidden_act=str(_first(hf, _ACT, hidden_act)),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", tied)),
            sliding_windows=(None,) * info.num_layers,
        )


def readable(settings: Callable[[ModelInfo], DecoderSettings], info: ModelInfo) -> DecoderSettings:
    """A family's settings; CheckpointError where config.json holds something else than it should."""
    try:
        return settings(info)
    except KeyError as error:
        raise CheckpointError(f"{info.directory}/config.json is not usable: it lacks {error}", param="model") from error
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise CheckpointError(f"{info.directory}/config.json is not usable: {error}", param="model") from error


def layer_types(info: ModelInfo, default: Sequence[str]) -> list[str]:
    """Returns what `layer_types` says of each layer, or else `default`; UnsupportedError names a type that is
    unknown."""
    types = info.hf_config.get("layer_types") or list(default)
    unknown = set(types) - {_SLIDING, _FULL}
    if unknown or len(types) != info.num_layers:
        raise UnsupportedError(f"layer_types: unknown {sorted(unknown)} or a wrong number of layers", param="model")
    return list(types)


def every_nth_full(info: ModelInfo, n: int) -> list[str]:
    """Layer types of which every n-th sees everything, from the n-th on."""
    return [_SLIDING if (i + 1) % n else _FULL for i in range(info.num_layers)]


def rotating_layers(info: ModelInfo) -> list[bool]:
    """Tells which layers have positions: `no_rope_layers` says so of each, against its name; else all but each n-th.
    UnsupportedError where it does not name each layer."""
    interval = int(info.hf_config.get("no_rope_layer_interval") or 4)
    named = info.hf_config.get("no_rope_layers") or [(i + 1) % interval for i in range(info.num_layers)]
    if len(named) != info.num_layers:
        raise UnsupportedError(f"no_rope_layers names {len(named)} of {info.num_layers} layers", param="model")
    return list(map(bool, named))


def windows_of(info: ModelInfo, types: Sequence[str], default: int | None = None) -> tuple[int | None, ...]:
    """The sliding windows of layers of these types; 0, as transformers writes for Qwen2-MoE, is none."""
    window = info.hf_config.get("sliding_window", default)
    return tuple(int(window) if kind == _SLIDING and window else None for kind in types)


def one_window(info: ModelInfo, default: int | None = None) -> tuple[int | None, ...]:
    """The same sliding window, if any, in every layer."""
    return windows_of(info, [_SLIDING] * info.num_layers, default)


def windows_by_layer_type(info: ModelInfo) -> tuple[int | None, ...]:
    """Sliding windows where `use_sliding_window` is set: of the layers that `layer_types` names, or, in older
    configurations, of those from `max_window_layers` on."""
    hf = info.hf_config
    if not hf.get("use_sliding_window", False):
        return (None,) * info.num_layers
    first = int(hf.get("max_window_layers", 28))
    return windows_of(info, layer_types(info, [_SLIDING if i >= first else _FULL for i in range(info.num_layers)]))


def _first(hf: Mapping[str, Any], names: Sequence[str], default: Any) -> Any:
    return next((hf[name] for name in names if hf.get(name) is not None), default)
