"""The forms in which vectors are answered: numbers, 8-bit numbers, signs packed into bytes, base64."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np

from app.records.step import Float32Array

VectorForm = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_MOST = 127


def _eighths(vector: Float32Array) -> np.ndarray[Any, Any]:
    """Whole numbers from -127 to 127. A vector's largest number is 127 of them, so that its direction stays: cosines
    need no calibration."""
    largest = float(np.abs(vector).max(initial=0.0))
    scaled: np.ndarray[Any, Any] = np.rint(vector * (_MOST / largest if largest else 0.0))
    return scaled.astype(np.int16)


def _signs(vector: Float32Array) -> np.ndarray[Any, Any]:
    """A bit for each number, 1 above 0, eight to a byte, the first the highest; zeros fill the last."""
    return np.packbits(vector > 0).astype(np.int16)


_FORMS: Mapping[VectorForm, Callable[[Float32Array], Any]] = {
    "float": lambda vector: vector.tolist(),
    "int8": lambda vector: _eighths(vector).tolist(),
    "uint8": lambda vector: (_eighths(vector) + _MOST + 1).tolist(),
    "binary": lambda vector: (_signs(vector) - _MOST - 1).tolist(),
    "ubinary": lambda vector: _signs(vector).tolist(),
    "base64": lambda vector: base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode(),
}
assert _FORMS.keys() == set(get_args(VectorForm))


def in_form(vector: Float32Array, form: VectorForm) -> Any:
    """A vector as JSON takes it. `float` and `base64` are for several in one array, too."""
    return _FORMS[form](vector)
