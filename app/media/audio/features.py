"""The contract of features of a sound, and how they are made in another process: the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from app.registry import Registry

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


class FeatureSettings(ABC):
    """Says how features of one sound are made: which maker, and its settings."""

    maker: ClassVar[str]  # in FEATURES
    num_mels: int
    num_frames: int

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """The settings as a plain object."""


class Features(Protocol):
    """Makes features of sounds, one after the other."""

    def of(self, samples: Floats) -> Floats:
        """[num_mels, num_frames] of a sound's samples."""


FEATURES: Registry[Any] = Registry(
    "features of sounds",
    {
        "framed_mel": "app.media.audio.framed_mel:FramedMelFeatures",
        "mel": "app.media.audio.mel:MelFeatures",
    },
)
