"""Dynamic time warping, judged by transformers'."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from app.api.openai.audio.alignment import token_ends


def judged(weights: np.ndarray) -> np.ndarray:
    tokens, places = _dynamic_time_warping(-weights.astype(np.float64))
    jumps = np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)
    return np.maximum(places[jumps], 0) * 0.02


@pytest.mark.parametrize("kind", ["noise", "ties", "slope"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (2, 2), (9, 3), (12, 50)])
def test_times_are_those_of_transformers(kind: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(shape))
    weights = rng.normal(size=shape).astype(np.float32)
    if kind == "ties":
        weights = np.rint(weights)
    if kind == "slope":
        distance = np.arange(shape[0])[:, None] / shape[0] - np.arange(shape[1]) / shape[1]
        weights = (weights / 8 - np.abs(distance)).astype(np.float32)
    found = token_ends(weights, 0.02)
    np.testing.assert_allclose(found, judged(weights), atol=1e-9)
    assert found == sorted(found)
