"""Rotary frequencies, one function for each `rope_type` that a Hugging Face configuration may name.

`default` (Su et al. 2021, RoFormer), `linear` (positions divided by a factor: Chen et al. 2023), `llama3`
(long wavelengths divided, short ones kept: Llama 3.1), `yarn` (Peng et al. 2023), `longrope` (a factor for each
frequency: Ding et al. 2024), `ntk` (a larger base, or a factor that grows with the dimension: GTE). `dynamic` changes
the frequencies with the length of the text, which would spoil keys that are cached already, so it is accepted only
where it changes nothing; `longrope` has two tables, and `max_model_len` chooses one of them for good.

The order of operations is transformers', so that the frequencies are too, to the last bit: far into a long context a
rounding error of a frequency would be an error of the angle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from app.errors import CheckpointError, UnsupportedError

NUM_AXES = 3  # coordinates of a token in what a prompt shows
Frequencies = tuple[torch.Tensor, float]  # inverse frequencies fp32 [D / 2], factor of cosines and sines


@dataclass(slots=True, frozen=True)
class RopeSettings:
    """Holds what a configuration says about rotary embedding."""

    dim: int  # of a head's dimensions, those that rotate
    theta: float
    rope_type: str = "default"
    max_position_embeddings: int = 2048
    max_model_len: int = 2048
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_hf(
        cls, hf_config: Mapping[str, Any], head_dim: int, max_model_len: int, layer_type: str = ""
    ) -> RopeSettings:
        """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

        Where they differ from layer type to layer type, those of `layer_type`. UnsupportedError names a rope_type that
        is not supported, CheckpointError what is missing.
        """
        parameters = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
        if any(isinstance(value, Mapping) for value in parameters.values()):
            if not isinstance(parameters.get(layer_type), Mapping):
                raise CheckpointError(f"config.json: rope_parameters lack {layer_type!r}", param="model")
            parameters = dict(parameters[layer_type])

        def either(name: str, default: float) -> Any:
            return parameters.get(name, hf_config.get(name, default))

        partial = number_of("partial_rotary_factor", either("partial_rotary_factor", 1.0))
        dim = int(head_dim * partial)
        if dim < 2 or dim % 2 or dim > head_dim:
            raise UnsupportedError(f"partial_rotary_factor {partial} rotates {dim} of {head_dim}", param="model")
        theta = number_of("rope_theta", either("rope_theta", 10000.0))
        rope_type = str(parameters.get("rope_type", parameters.get("type", "default")))
        rope_type = {"su": "longrope", "mrope": "default"}.get(rope_type, rope_type)  # names in older configurations
        if rope_type not in ROPE_TYPES:
            known = ", ".join(sorted(ROPE_TYPES))
            raise UnsupportedError(f"unknown rope_type {rope_type!r}; known: {known}", param="model")
        dim = head_dim if rope_type == "proportional" else dim
        limit = int(number_of("max_position_embeddings", hf_config.get("max_position_embeddings", 2048)))
        if parameters.get("original_max_position_embeddings") is None and rope_type == "longrope":
            parameters["original_max_position_embeddings"] = hf_config.get("original_max_position_embeddings", limit)
        return cls(dim, theta, rope_type, limit, max_model_len, parameters)

    @classmethod
    def none(cls, parameters: Mapping[str, Any] = MappingProxyType({})) -> RopeSettings:
        """No rotation: of layers that know no positions, or learned ones."""
        return cls(dim=2, theta=1.0, rope_type="none", parameters=parameters)

    def frequencies(self) -> Frequencies:
        """Inverse frequencies fp32 [D / 2] and the factor of cosines and sines. CheckpointError where numbers of the
        settings have none."""
        try:
            return ROPE_TYPES[self.rope_type](self)
        except (ArithmeticError, TypeError, ValueError) as error:
            what = f"rope_type {self.rope_type!r} with rope_theta {self.theta:g} and {dict(self.parameters)!r:.200}"
            raise CheckpointError(f"config.json: {what}: {error}", param="model") from error

    def query_scales(self, num_positions: int) -> torch.Tensor | None:
        """Returns what queries far into the text are multiplied by (Llama 4's scaling), fp32 [P]; None: nothing."""
        if self.parameters.get("llama_4_scaling_beta") is None:
            return None
        original = self.number("original_max_position_embeddings")
        positions = torch.arange(num_positions, dtype=torch.float32, device="cpu") + self.number("first_position", 0)
        turns = torch.floor(positions / original)
        return 1 + self.number("llama_4_scaling_beta") * torch.log(1 + turns)

    def axes(self) -> torch.Tensor | None:
        """Finds which coordinate each of the D / 2 frequencies rotates by, int64: frame, row or column of a picture
        (M-RoPE: Wang et al., "Qwen2-VL", 2024); None: a position is one number."""
        sections = self.parameters.get("mrope_section")
        if sections is None:
            return None
        if not isinstance(sections, Sequence) or len(sections) != NUM_AXES or sum(sections) != self.dim // 2:
            raise CheckpointError(
                f"config.json: mrope_section is {sections!r:.80}, not {NUM_AXES} numbers with the sum {self.dim // 2}",
                param="model",
            )
        axes = torch.arange(NUM_AXES, device="cpu").repeat_interleave(torch.tensor(sections, device="cpu"))
        if self.parameters.get("mrope_interleaved"):  # they take turns, as far as each goes; the rest is the first's
            axes.zero_()
            for axis in range(1, NUM_AXES):
                axes[axis : sections[axis] * NUM_AXES : NUM_AXES] = axis
        return axes

    def number(self, name: str, default: float | None = None) -> float:
        """A number of the settings; CheckpointError when it is required and missing."""
        value = self.parameters.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config.json: rope_type {self.rope_type!r} needs {name!r}", param="model")
        return number_of(name, value)

    def periods(self) -> torch.Tensor:
        """Unscaled frequencies' inverses, fp32 [D / 2]."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim
        return self.theta**exponents

    def base(self) -> torch.Tensor:
        """Unscaled inverse frequencies, fp32 [D / 2]."""
        return 1.0 / self.periods()


def number_of(name: str, value: Any) -> float:
    """The value of the field `name` as a number; CheckpointError where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"config.json: {name} is {value!r}, not a number", param="model")
    return float(value)


def _proportional(settings: RopeSettings) -> Frequencies:
    """Those of the whole head, of which all but the first share are 0 (Gemma 4)."""
    share = number_of("partial_rotary_factor", settings.parameters.get("partial_rotary_factor", 1.0))
    turning = int(share * settings.dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.float32, device="cpu") / settings.dim
    inv_freq = torch.cat((1.0 / settings.theta**exponents, torch.zeros(settings.dim // 2 - turning, device="cpu")))
    return inv_freq / number_of("factor", settings.parameters.get("factor", 1.0)), 1.0


def _none(settings: RopeSettings) -> Frequencies:
    return torch.zeros(settings.dim // 2, dtype=torch.float32, device="cpu"), 1.0


def _default(settings: RopeSettings) -> Frequencies:
    return settings.base(), 1.0


def _linear(settings: RopeSettings) -> Frequencies:
    return settings.base() / settings.number("factor"), 1.0


def _dynamic(settings: RopeSettings) -> Frequencies:
    if settings.max_model_len > settings.max_position_embeddings:
        raise UnsupportedError(
            f"rope_type 'dynamic' beyond max_position_embeddings: set max_model_len to at most "
            f"{settings.max_position_embeddings} (now {settings.max_model_len})",
            param="max_model_len",
        )
    return settings.base(), 1.0


def _ntk(settings: RopeSettings) -> Frequencies:
    """GTE's, for contexts beyond what the model was first trained on: with `mixed_b`, each wavelength by a factor of
    its own."""
    factor, mixed, half = settings.number("factor"), settings.parameters.get("mixed_b"), settings.dim // 2
    if factor <= 1:
        return settings.base(), 1.0
    if mixed is None:
        wider = replace(settings, theta=settings.theta * factor)
        return wider.base() / factor ** (1 / half), 1.0
    growth = number_of("mixed_b", mixed)
    places = torch.arange(1, half + 1, dtype=torch.float32, device="cpu")
    return settings.base() / torch.exp(math.log(factor) / half**growth * places**growth), 1.0


def _llama3(settings: RopeSettings) -> Frequencies:
    factor = settings.number("factor")
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    original = settings.number("original_max_position_embeddings", settings.max_position_embeddings)
    inv_freq = settings.base()
    turns = original / (2 * math.pi / inv_freq)  # full turns within the original context
    # Weight of the unscaled frequency: 0 for fewer than `low` turns, 1 for more than `high`, a ramp in between.
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * inv_freq / factor + keep * inv_freq, 1.0


def _yarn(settings: RopeSettings) -> Frequencies:
    dim, original = (
        settings.dim,
        settings.number("original_max_position_embeddings", settings.max_position_embeddings),
    )
    factor = settings.number("factor", settings.max_position_embeddings / original)

    def dimension(turns: float) -> float:
        """The (fractional) dimension that makes `turns` full turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(settings.theta))

    low = dimension(settings.number("beta_fast", 32))
    high = dimension(settings.number("beta_slow", 1))
    if settings.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    periods = settings.periods()
    inv_freq = 1.0 / (factor * periods) * (1.0 - keep) + 1.0 / periods * keep
    return inv_freq, _yarn_attention_factor(settings, factor)


def _yarn_attention_factor(settings: RopeSettings, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if settings.parameters.get("attention_factor") is not None:
        return settings.number("attention_factor")
    if settings.parameters.get("mscale") and settings.parameters.get("mscale_all_dim"):
        return mscale(settings.number("mscale")) / mscale(settings.number("mscale_all_dim"))
    return mscale(1.0)


def _longrope(settings: RopeSettings) -> Frequencies:
    original = settings.number("original_max_position_embeddings")
    name = "long_factor" if settings.max_model_len > original else "short_factor"
    factors = settings.parameters.get(name)
    if not isinstance(factors, Sequence) or len(factors) != settings.dim // 2:
        raise CheckpointError(
            f"config.json: rope_type 'longrope' needs {settings.dim // 2} numbers in {name!r}", param="model"
        )
    inv_freq = 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * settings.periods())
    if settings.parameters.get("attention_factor") is not None:
        return inv_freq, settings.number("attention_factor")
    stretch = settings.number("factor", settings.max_position_embeddings / original)
    return inv_freq, 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


ROPE_TYPES: dict[str, Callable[[RopeSettings], Frequencies]] = {
    "none": _none,
    "proportional": _proportional,
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk": _ntk,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
