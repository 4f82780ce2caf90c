"""Scores by vectors, weights and vectors of tokens; the judge adds them up number by number. Over HTTP:
tests/api/pooling/test_token_vectors.py."""

from __future__ import annotations

import numpy as np
import pytest

from app.records.mixed_scores import TextParts, mixed_score

ONE = TextParts(np.array([1.0, 0.0], np.float32), {3: 0.5, 4: 1.0}, np.array([[1.0, 0.0], [0.0, 1.0]], np.float32))
TWO = TextParts(np.array([0.6, 0.8], np.float32), {4: 0.25, 9: 7.0}, np.array([[0.6, 0.8], [0.8, 0.6]], np.float32))


def test_each_kind_and_their_mean() -> None:
    found = {kind: mixed_score({kind: 2.0}, ONE, TWO) for kind in ("dense", "sparse", "vectors")}
    assert found == {"dense": pytest.approx(0.6), "sparse": pytest.approx(0.25), "vectors": pytest.approx(0.8)}
    assert mixed_score({"dense": 1, "sparse": 3, "vectors": 0}, ONE, TWO) == pytest.approx((0.6 + 3 * 0.25) / 4)
