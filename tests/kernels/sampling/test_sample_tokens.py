"""Logits to tokens in one go: against NumPy in float64, on the CPU path and in Triton (interpreter, or a real GPU)."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from app.kernels.sampling import reference, triton_sample, uniform
from app.kernels.sampling.triton_ops import perturb

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
PATHS = [pytest.param(reference.sample_tokens, id="torch"), pytest.param(triton_sample.sample_tokens, id="triton")]
Path = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# (temperature, top_k, top_p, min_p): every filter alone, together, off, and beyond the vocabulary.
ROWS = [
    (0.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.1),
    (1.0, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.3, 40, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.8, 0, 0.999, 0.0),
    (1.0, 0, 0.01, 0.0),
    (1.0, 50, 0.8, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.5, 0, 0.7, 0.02),
    (1.0, 30, 0.95, 0.01),
    (1.0, 10**6, 1.0, 0.0),
    (2.0, -1, 0.5, 0.0),
    (1.0, 0, 1.0, 1.0),
    (1.0, 3, 1.0, 1e-9),
]


def arguments(logits: torch.Tensor, rows: list[tuple[float, int, float, float]]) -> tuple[torch.Tensor, ...]:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    generator = torch.Generator().manual_seed(3)
    keys = torch.stack([torch.randint(-(2**62), 2**62, (len(rows),), generator=generator), torch.arange(len(rows)) % 4])
    tensors = (
        logits,
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        keys.T,
        torch.arange(len(rows)) * 37,
    )
    return tuple(tensor.to(DEVICE) for tensor in tensors)


def numpy_kept(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, np.ndarray]:
    """(tokens that are kept, tokens whose fate a rounding may decide), from fp32 logits in float64."""
    probs = np.exp(scaled.astype(np.float64) - scaled.max())
    kept = np.ones(len(scaled), dtype=bool)
    unsure = np.zeros(len(scaled), dtype=bool)
    if min_p > 0:
        kept &= probs >= min_p
        unsure |= np.abs(probs / min_p - 1.0) < 1e-5
    if 0 < top_k < len(scaled):
        kept &= scaled >= np.sort(scaled)[-top_k]
    if top_p < 1.0:
        left = np.where(kept, probs, 0.0)
        _, inverse = np.unique(left, return_inverse=True)
        mass = np.bincount(inverse, weights=left)
        above = (mass.sum() - np.cumsum(mass))[inverse] / mass.sum()
        kept &= above < top_p
        unsure |= np.abs(above - top_p) < 1e-5
    return kept, unsure


def expected_tokens(args: tuple[torch.Tensor, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in float64, and whether a rounding could decide otherwise."""
    logits, temperature, top_k, top_p, min_p, keys, positions = (tensor.cpu() for tensor in args)
    noise = uniform(keys, positions, logits.shape[1], 0).double().numpy()
    tokens, sure = [], []
    for row in range(len(logits)):
        if temperature[row] <= 0:
            tokens.append(int(logits[row].float().numpy().argmax()))
            sure.append(True)
            continue
        scaled = (logits[row].float() / temperature[row]).numpy()
        kept, unsure = numpy_kept(scaled, int(top_k[row]), float(top_p[row]), float(min_p[row]))
        scores = scaled.astype(np.float64) - np.log(-np.log1p(-noise[row]))
        token = int(np.where(kept, scores, -np.inf).argmax())
        tokens.append(token)
        sure.append(not unsure[np.where(kept | unsure, scores, -np.inf).argmax()])
    return np.array(tokens), np.array(sure)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("vocab_size", "scale"), [(7, 2.0), (1003, 0.05), (1003, 6.0), (5000, 2.5)])
def test_tokens_equal_numpy(path: Path, vocab_size: int, scale: float) -> None:
    logits = torch.randn(len(ROWS), vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale
    args = arguments(logits, ROWS)
    sampled, logprobs = path(*args)
    expected, sure = expected_tokens(args)
    assert sure.sum() >= len(ROWS) - 1, "the case should leave little to rounding"
    np.testing.assert_array_equal(sampled.cpu().numpy()[sure], expected[sure])
    truth = torch.log_softmax(logits.double(), -1).gather(1, sampled.cpu()[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.cpu().double(), truth, rtol=0, atol=2e-5)


@pytest.mark.parametrize("path", PATHS)
def test_an_infinite_logit_is_drawn(path: Path) -> None:
    """As a processor forces a token, or where a head overflows; the lowest of several, whatever the tile."""
    logits = torch.randn(5, 2500, generator=torch.Generator().manual_seed(8))
    for row, tokens in enumerate([(7,), (2400,), (2300, 2400), (9, 2400), (0,)]):
        logits[row, list(tokens)] = INF
    for temperature in (1.0, 1e-3, 50.0):
        drawn, _ = path(*arguments(logits, [(temperature, 0, 1.0, 0.0)] * 5))
        assert drawn.tolist() == [7, 2400, 2300, 9, 0]


def test_search_in_the_whole_row_finds_the_same() -> None:
    logits = torch.randn(len(ROWS), 1003, generator=torch.Generator().manual_seed(5)) * 3
    args = arguments(logits, ROWS)
    usual = triton_sample.sample_tokens(*args)
    with mock.patch.object(triton_sample, "_CAPACITY", 16):
        whole = triton_sample.sample_tokens(*args)
    assert torch.equal(usual[0], whole[0])


def kept_tokens(path: Path, logits: list[float], row: tuple[float, int, float, float]) -> set[int]:
    """Tokens that come up in many draws of one row. The draws are always the same ones, so few are enough."""
    draws = 8 if path is triton_sample.sample_tokens and DEVICE == "cpu" else 400
    args = arguments(torch.tensor(logits).repeat(draws, 1), [row] * draws)
    return set(path(*args)[0].tolist())


@pytest.mark.parametrize("path", PATHS)
def test_ties_with_the_last_kept_are_kept(path: Path) -> None:
    assert kept_tokens(path, [1.0, 3.0, 3.0, 3.0, 0.0], (1.0, 2, 1.0, 0.0)) == {1, 2, 3}
    assert kept_tokens(path, [1.0, 3.0, 3.0, 3.0, 0.0], (1.0, 0, 0.2, 0.0)) == {1, 2, 3}
    assert kept_tokens(path, [0.0, -0.0, -5.0, -6.0], (1.0, 1, 1.0, 0.0)) == {0, 1}
    assert kept_tokens(path, [-1.0, -1.0, -INF, -9.0], (1.0, 3, 1.0, 0.0)) == {0, 1}
    assert kept_tokens(path, [2.0, -INF, 2.0, -INF], (1.0, 3, 1.0, 0.0)) == {0, 2}


@pytest.mark.parametrize("path", PATHS)
def test_greedy_takes_the_lowest_id_and_masked_rows_a_valid_one(path: Path) -> None:
    logits = torch.zeros(4, 3000)
    logits[0, 7] = logits[0, 2900] = 1.0
    logits[1] = -INF
    logits[2] = -INF
    logits[2, 2500] = -3.0
    logits[3] = -INF
    args = arguments(logits, [(0.0, 0, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 5, 0.5, 0.1), (0.0, 0, 1.0, 0.0)])
    sampled, logprobs = path(*args)
    assert sampled[0] == 7
    assert sampled[2] == 2500
    assert logprobs[2].abs() < 1e-6
    assert bool(((sampled >= 0) & (sampled < 3000)).all())


def test_a_row_alone_draws_what_it_draws_in_a_batch() -> None:
    logits = torch.randn(len(ROWS), 2500, generator=torch.Generator().manual_seed(9)) * 4
    args = arguments(logits, ROWS)
    sampled, logprobs = triton_sample.sample_tokens(*args)
    for row in (2, 11):
        alone = triton_sample.sample_tokens(*(tensor[row : row + 1] for tensor in args))
        assert alone[0][0] == sampled[row]
        assert alone[1][0] == logprobs[row]


@pytest.mark.parametrize("path", PATHS)
def test_half_precision_row_stride_purpose_and_no_rows(path: Path) -> None:
    logits = (torch.randn(len(ROWS), 900, generator=torch.Generator().manual_seed(2)) * 4).half()[:, :333]
    args = arguments(logits, ROWS)
    sampled, _ = path(*args)
    expected, sure = expected_tokens(args)
    np.testing.assert_array_equal(sampled.cpu().numpy()[sure], expected[sure])
    unfiltered = tuple(tensor[[2, 12] * 4] for tensor in args)
    assert not torch.equal(path(*unfiltered)[0], path(*unfiltered, purpose=3)[0])
    assert path(*(tensor[:0] for tensor in args))[0].shape == (0,)


@triton.jit
def both_noises_kernel(p_words, p_about, p_noise, BN: tl.constexpr):
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    b_word = tl.load(p_words + o).to(tl.uint32, bitcast=True)
    tl.store(p_about + o, triton_sample.noise_about(b_word))
    tl.store(p_noise + o, perturb(tl.zeros([BN], dtype=tl.float32), b_word))


@pytest.mark.filterwarnings("ignore:.*encountered in (divide|multiply):RuntimeWarning")
def test_who_may_be_the_best_is_known_by_noise_that_is_not_far_off() -> None:
    """Both ends of the words, and many between."""
    ends = torch.arange(2048, dtype=torch.int64)
    words = torch.cat([ends, 2**32 - 1 - ends, torch.arange(0, 2**32, 2**16 + 1)[: 2**16 - 4096]])
    words = torch.where(words >= 2**31, words - 2**32, words).int().to(DEVICE)
    about, noise = (torch.empty(len(words), device=DEVICE) for _ in range(2))
    both_noises_kernel[(len(words) // 2048,)](words, about, noise, BN=2048)
    assert float((about - noise).abs().max()) < triton_sample.ROUGHLY.value / 4


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels keep their constants")
def test_of_those_that_come_near_the_best_the_best_is_drawn() -> None:
    """By numbers that are not exact all tokens come near the best: each is computed, and the same one wins."""
    logits = torch.randn(2, 700, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    drawn = triton_sample.sample_tokens(*arguments(logits, [(0.9, 0, 1.0, 0.0)] * 2))
    with mock.patch.object(triton_sample, "ROUGHLY", tl.constexpr(20.0)):
        again = triton_sample.sample_tokens(*arguments(logits, [(0.9, 0, 1.0, 0.0)] * 2))
    assert all(map(torch.equal, drawn, again))


OFF, about = tl.constexpr(0.9 * triton_sample.ROUGHLY.value), triton_sample.noise_about


@triton.jit
def noise_that_is_off(b_word):
    """Of the lower half of words too small, of the others too large, each nearly as far as is allowed."""
    return about(b_word) + tl.where(b_word.to(tl.float32) < 2147483648.0, -OFF, OFF)


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels keep their functions")
def test_the_best_is_drawn_where_another_one_seems_better() -> None:
    """By numbers as wrong as they may be."""
    logits = torch.full((1, 700), -20.0)
    args = arguments(logits, [(1.0, 0, 1.0, 0.0)])
    numbers = uniform(args[5], args[6], 700, 0)[0].double().cpu()
    best, second = int((numbers < 0.5).nonzero()[5]), int((numbers > 0.5).nonzero()[5])
    scores = torch.tensor([3.0, 3.0 - 1e-4]) + (-numbers[[best, second]].neg().log1p()).log()
    args[0][0, [best, second]] = scores.float()
    with mock.patch.object(triton_sample, "noise_about", noise_that_is_off):
        assert int(triton_sample.sample_tokens(*args)[0]) == best


@pytest.mark.parametrize("path", [PATHS[0], pytest.param(*PATHS[1].values, id="triton", marks=pytest.mark.gpu)])
def test_draws_follow_the_renormalised_distribution(path: Path) -> None:
    num_draws = 4000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -3.0, 1.5, -8.0])
    row = (0.9, 6, 0.9, 0.0)
    args = list(arguments(logits.repeat(num_draws, 1), [row] * num_draws))
    args[5] = torch.tensor([[5, 0]], device=DEVICE).expand(num_draws, 2)
    args[6] = torch.arange(num_draws, device=DEVICE)
    kept, _ = numpy_kept((logits / 0.9).numpy(), 6, 0.9, 0.0)
    probs = np.where(kept, np.exp(logits.double().numpy() / 0.9), 0.0)
    probs /= probs.sum()
    counts = np.bincount(path(*args)[0].cpu().numpy(), minlength=8)
    assert counts[probs == 0].sum() == 0
    assert stats.chisquare(counts[probs > 0], probs[probs > 0] * num_draws).pvalue > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_large_vocabulary_on_the_gpu(dtype: torch.dtype, scale: float) -> None:
    rows = ROWS * 4
    logits = (torch.randn(len(rows), 151_936, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    args = arguments(logits, rows)
    sampled, _ = triton_sample.sample_tokens(*args)
    expected, sure = expected_tokens(args)
    assert sure.mean() > 0.8
    np.testing.assert_array_equal(sampled.cpu().numpy()[sure], expected[sure])


@pytest.mark.gpu
def test_one_graph_serves_every_mix_of_rows() -> None:
    generator = torch.Generator().manual_seed(4)
    static = arguments(torch.randn(len(ROWS), 32_000, generator=generator) * 3, ROWS)
    triton_sample.sample_tokens(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton_sample.sample_tokens(*static)
    for shift in range(3):
        other = arguments(torch.randn(len(ROWS), 32_000, generator=generator) * 3, ROWS[shift:] + ROWS[:shift])
        for target, source in zip(static, other, strict=True):
            target.copy_(source)
        graph.replay()
        eager = triton_sample.sample_tokens(*other)
        assert torch.equal(captured[0], eager[0])
        assert torch.equal(captured[1], eager[1])
