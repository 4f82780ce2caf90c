"""Scores of a model that reads many documents at once; plain cosines are the judge."""

from __future__ import annotations

import numpy as np

from app.records.listwise import listwise_scores


def cosine(one: np.ndarray, two: np.ndarray) -> float:  # type: ignore[type-arg]
    return float(one @ two / np.linalg.norm(one) / np.linalg.norm(two))


def test_one_prompt() -> None:
    rows = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    expected = [cosine(rows[-1], row) for row in rows[:-1]]
    np.testing.assert_allclose(listwise_scores([rows]), expected, atol=1e-6)


def test_the_query_is_the_mean_of_several_prompts_by_their_best_scores() -> None:
    random = np.random.default_rng(1)
    prompts = [random.normal(size=(count, 8)).astype(np.float32) for count in (4, 3, 2)]
    weights = [max((1 + cosine(rows[-1], row)) / 2 for row in rows[:-1]) for rows in prompts]
    query = sum(weight * rows[-1] for weight, rows in zip(weights, prompts, strict=True)) / sum(weights)
    expected = [cosine(query, row) for rows in prompts for row in rows[:-1]]
    np.testing.assert_allclose(listwise_scores(prompts), expected, atol=1e-6)


def test_vectors_without_a_length() -> None:
    assert listwise_scores([np.zeros((3, 4), np.float32)]) == [0.0, 0.0]
    opposite = np.array([[1, 0], [-1, 0]], np.float32)
    assert listwise_scores([opposite, opposite]) == [-1.0, -1.0]
