"""Gumbel-argmax against the analytic distribution (chi-square); the filters against loops in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from app.kernels.sampling import apply_min_p, apply_top_k_top_p, uniform
from app.kernels.sampling.reference import gumbel_argmax

INF = float("inf")


def keys_of(num_rows: int, seed: int = 11) -> torch.Tensor:
    return torch.stack([torch.full((num_rows,), seed), torch.zeros(num_rows, dtype=torch.long)], dim=1)


@pytest.mark.parametrize("spread", [0.5, 3.0, 40.0])
def test_gumbel_argmax_follows_softmax(spread: float) -> None:
    # spread 40 leaves few candidates, so the sparse path draws; at 0.5 all are candidates.
    num_draws, vocab_size = 40_000, 33
    logits = torch.linspace(0, spread, vocab_size)[torch.randperm(vocab_size, generator=torch.manual_seed(1))]
    sampled = gumbel_argmax(logits.expand(num_draws, -1), keys_of(num_draws), torch.arange(num_draws))
    expected = torch.softmax(logits.double(), 0).numpy() * num_draws
    counts = np.bincount(sampled.numpy(), minlength=vocab_size).astype(float)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    if wanted[-1] < 5:  # fold a rare rest into the rarest common token
        observed = np.append(observed[:-2], observed[-2] + observed[-1])
        wanted = np.append(wanted[:-2], wanted[-2] + wanted[-1])
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def dense_gumbel_argmax(logits: np.ndarray, u: np.ndarray) -> np.ndarray:
    return np.argmax(logits - np.log(-np.log1p(-u)), axis=1)


@pytest.mark.parametrize("kept", [1, 5, 400])
def test_gumbel_argmax_equals_numpy_and_ignores_the_batch(kept: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(16, 401) * 4
    logits.masked_fill_(logits < logits.topk(kept, dim=-1).values[:, -1:], -INF)
    keys, positions = keys_of(16, seed=-3), torch.arange(100, 116)
    sampled = gumbel_argmax(logits, keys, positions)
    u = uniform(keys, positions, 401, 0).double().numpy()
    np.testing.assert_array_equal(sampled.numpy(), dense_gumbel_argmax(logits.double().numpy(), u))
    for row in range(16):
        assert gumbel_argmax(logits[row : row + 1], keys[row : row + 1], positions[row : row + 1]) == sampled[row]


def numpy_top_k_top_p(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    kept = np.ones(len(logits), dtype=bool)
    if 0 < top_k < len(logits):
        kept = logits >= np.sort(logits)[-top_k]
    if top_p < 1.0:
        probs = np.where(kept, np.exp(logits.astype(np.float64) - logits.max()), 0.0)
        probs /= probs.sum()
        mass, nucleus = 0.0, np.zeros(len(logits), dtype=bool)
        for token in np.argsort(-probs, kind="stable"):
            if mass >= top_p:
                break
            nucleus[token] = True
            mass += probs[token]
        kept &= nucleus
    return np.where(kept, logits, -np.inf)


@pytest.mark.parametrize("vocab_size", [7, 103, 500])
@pytest.mark.parametrize("scale", [0.1, 2.0, 10.0])
@pytest.mark.parametrize("with_max", [False, True])
def test_top_k_top_p_equal_numpy(vocab_size: int, scale: float, with_max: bool) -> None:
    torch.manual_seed(vocab_size)
    top_k = torch.tensor([0, 1, 3, 5, 100, -1, 2, 40], dtype=torch.int32)
    top_p = torch.tensor([0.5, 0.9, 1.0, 0.01, 0.95, 1.0, 0.3, 0.7])
    logits = torch.randn(8, vocab_size) * scale
    rows = slice(1, 5) if with_max else slice(0, 8)  # rows 1 to 4 all have a top_k
    got = apply_top_k_top_p(
        logits[rows].clone(), top_k[rows], top_p[rows], max_top_k=min(100, vocab_size) if with_max else None
    )
    for row, result in zip(range(8)[rows], got, strict=True):
        expected = numpy_top_k_top_p(logits[row].numpy(), int(top_k[row]), float(top_p[row]))
        np.testing.assert_array_equal(result.numpy(), expected)


def test_each_filter_alone_and_rows_do_not_mix() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 300) * 3
    top_k = torch.tensor([5, 0, 7, 300, 1, 299], dtype=torch.int32)
    top_p = torch.tensor([0.5, 1.0, 0.999, 0.1, 0.9, 0.75])
    for k, p in ((top_k, None), (None, top_p), (top_k, top_p)):
        batch = apply_top_k_top_p(logits.clone(), k, p)
        for row in range(6):
            one = slice(row, row + 1)
            alone = apply_top_k_top_p(logits[one].clone(), None if k is None else k[one], None if p is None else p[one])
            assert torch.equal(alone[0], batch[row])
            expected = numpy_top_k_top_p(
                logits[row].numpy(), 0 if k is None else int(k[row]), 1.0 if p is None else float(p[row])
            )
            np.testing.assert_array_equal(batch[row].numpy(), expected)


def test_ties_with_the_last_kept_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    kept = apply_top_k_top_p(logits.clone(), torch.tensor([2]), None)[0]
    assert kept.tolist() == [-INF, 3.0, 3.0, 3.0, -INF]
    kept = apply_top_k_top_p(logits.clone(), None, torch.tensor([0.2]))[0]
    assert kept.tolist() == [-INF, 3.0, 3.0, 3.0, -INF]


def test_nothing_set_changes_nothing() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    assert apply_top_k_top_p(logits, None, None) is logits
    assert apply_min_p(logits, None) is logits
    apply_top_k_top_p(logits, torch.tensor([0, -1, 50]), torch.ones(3))
    apply_min_p(logits, torch.zeros(3))
    assert torch.equal(logits, before)


def test_min_p_equals_numpy() -> None:
    torch.manual_seed(3)
    logits = torch.randn(4, 200) * 3
    min_p = torch.tensor([0.0, 0.05, 0.5, 1.0])
    got = apply_min_p(logits.clone(), min_p).numpy()
    probs = torch.softmax(logits.double(), -1).numpy()
    for row in range(4):
        kept = probs[row] >= min_p[row].item() * probs[row].max() * (1 - 1e-9)
        np.testing.assert_array_equal(got[row], np.where(kept, logits[row].numpy(), -np.inf))
    assert np.isfinite(got[3]).sum() == 1


def test_filtered_sampling_follows_the_renormalised_distribution() -> None:
    num_draws = 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -3.0, 1.5, -8.0])
    filtered = apply_top_k_top_p(
        logits.repeat(num_draws, 1), torch.full((num_draws,), 6), torch.full((num_draws,), 0.9), max_top_k=6
    )
    kept = torch.tensor(numpy_top_k_top_p(logits.numpy(), 6, 0.9))
    sampled = gumbel_argmax(filtered, keys_of(num_draws, seed=5), torch.arange(num_draws))
    probs = torch.softmax(kept.double(), 0).numpy()
    counts = np.bincount(sampled.numpy(), minlength=8)
    assert counts[probs == 0].sum() == 0
    assert stats.chisquare(counts[probs > 0], probs[probs > 0] * num_draws).pvalue > 1e-3
    assert math.isclose(probs.sum(), 1.0)
