"""Reads what a checkpoint says of its encoder: `vision_config`, and how pixels are normalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from app.checkpoints.fields.kinds import check, number, several
from app.checkpoints.fields.vision_json import JOINT_FIELDS, VISION_FIELDS
from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError
from app.media.settings import read_settings

Triple = tuple[float, float, float]
HALF: Triple = (0.5, 0.5, 0.5)  # SigLIP's
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)
_TRIPLE = several(number(-1e3, 1e3), 3, 3)
_PIXEL_FIELDS = {
    **dict.fromkeys(("image_mean", "image_std"), _TRIPLE),
    "rescale_factor": number(above=0, most=1e3),
}


class VisionConfig:
    """`vision_config` with a family's defaults; CheckpointError names a field that is unusable or lacking."""

    def __init__(self, info: ModelInfo, defaults: Mapping[str, Any]) -> None:
        self._file = f"{info.directory}/config.json"
        given = {name: value for name, value in info.hf_config["vision_config"].items() if value is not None}
        check(given, VISION_FIELDS, self._file, "vision_config.")
        self._values = {**defaults, **given}

    @classmethod
    def of_model(cls, info: ModelInfo, defaults: Mapping[str, Any]) -> VisionConfig:
        """The same of the fields beside `vision_config`, those that join an encoder and a text."""
        beside = {name: info.hf_config[name] for name in JOINT_FIELDS if name in info.hf_config}
        joint = cls.__new__(cls)
        joint._file = f"{info.directory}/config.json"
        check(beside, JOINT_FIELDS, joint._file)
        joint._values = {**defaults, **beside}
        return joint

    def with_value(self, name: str, value: Any) -> VisionConfig:
        """The same with another value."""
        other = copy(self)
        other._values = {**self._values, name: value}
        return other

    def whole(self, *names: str) -> int:
        """The number under the first of these names that is there."""
        value = self._value(*names)
        if isinstance(value, Sequence):
            raise CheckpointError(f"{self._file} is not usable: {names[0]} is {value}, not one number", param="model")
        return int(value)

    def number(self, *names: str) -> float:
        """The same for any number."""
        return float(self._value(*names))

    def text(self, name: str) -> str:
        """A text."""
        return str(self._value(name))

    def flag(self, name: str) -> bool:
        """True or false; false where it is left out."""
        return bool(self._values.get(name, False))

    def layers(self, name: str) -> tuple[int, ...]:
        """Numbers of layers."""
        return tuple(int(layer) for layer in self._values.get(name, ()))

    def side(self, name: str) -> int:
        """The side of a square, which may be told twice."""
        value = self._value(name)
        sides = {int(side) for side in (value if isinstance(value, Sequence) else (value,))}
        if len(sides) > 1:
            raise CheckpointError(f"{self._file} is not usable: vision_config.{name} is no square", param="model")
        return sides.pop()

    def depths(self, name: str, num_layers: int) -> tuple[int, ...]:
        """Says how many layers are run for each of one or several chosen ones, which may be counted from the last."""
        value = self._value(name)
        chosen = value if isinstance(value, Sequence) else (value,)
        depths = tuple(int(layer) if layer >= 0 else num_layers + 1 + int(layer) for layer in chosen)
        if not depths or min(depths) < 0 or max(depths) > num_layers:
            reason = f"{name} is {value}, of {num_layers} layers"
            raise CheckpointError(f"{self._file} is not usable: {reason}", param="model")
        return depths

    def _value(self, *names: str) -> Any:
        found = next((self._values[name] for name in names if name in self._values), None)
        if found is None:
            raise CheckpointError(f"{self._file} is not usable: vision_config lacks {names[0]}", param="model")
        return found


@dataclass(slots=True, frozen=True)
class Normalization:
    """Turns pixels of 0 to 255 into an encoder's numbers: (x * scale - mean) / std, by channel."""

    mean: Triple
    std: Triple
    scale: float = 1 / 255

    @classmethod
    def of(cls, info: ModelInfo, mean: Triple, std: Triple) -> Normalization:
        """The checkpoint's own, or a family's."""
        found = read_settings(info.directory)
        check(found, _PIXEL_FIELDS, f"{info.directory}: the image processor")
        if not all(found.get("image_std", std)):
            raise CheckpointError(f"{info.directory}: image_std holds 0", param="model")
        return cls(
            _triple(found.get("image_mean", mean)),
            _triple(found.get("image_std", std)),
            float(found.get("rescale_factor", 1 / 255)),
        )

    def apply(self, pixels: torch.Tensor, channel_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Uint8 pixels with three channels along a dimension -> `dtype`."""
        shape = [1] * pixels.ndim
        shape[channel_dim] = 3
        mean, std = (one.view(shape) for one in _on_device(self.mean, self.std, pixels.device))
        normalized: torch.Tensor = (pixels.float() * self.scale - mean) / std
        return normalized.to(dtype)


@lru_cache(maxsize=64)
def _on_device(mean: Triple, std: Triple, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Fp32 [3] each; sent once, as a step waits for what it sends from memory that is not pinned."""
    with torch.inference_mode(False):
        return torch.tensor(mean, device=device), torch.tensor(std, device=device)


def _triple(values: Sequence[float]) -> Triple:
    red, green, blue = values
    return float(red), float(green), float(blue)
