"""Describes what a request gives a model's encoder to read, beside the tokens of its decoder: a sound or a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

EncoderKind = Literal["audio", "text"]
# Types of the values: features of a sound, as the model's extractor gives them, and the ids of a text's tokens.
INPUT_TYPES: dict[EncoderKind, np.dtype[np.generic]] = {"audio": np.dtype("<f4"), "text": np.dtype("<i4")}


@dataclass(slots=True, frozen=True)
class EncoderInput:
    """Holds what the decoder attends to as a whole from its first token on; it has no place among the prompt's tokens.

    `digest` is its identity: over its tenant, kind, values and every setting that they were made with; of a sound also
    keyed, as others may see it.
    """

    kind: EncoderKind
    digest: bytes
    length: int  # positions of the encoder's output
    shape: tuple[int, ...]  # of the values
    values: bytes  # of INPUT_TYPES, row by row

    def array(self) -> NDArray[np.generic]:
        """The values, to be read only."""
        return np.frombuffer(self.values, INPUT_TYPES[self.kind]).reshape(self.shape)


def encoder_input_of(asks: Sequence[object]) -> EncoderInput | None:
    """The encoder's input among what a request brings; None: it brings none."""
    return next((ask for ask in asks if isinstance(ask, EncoderInput)), None)
