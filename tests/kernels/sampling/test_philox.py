"""Philox against the published known-answer vectors and against an independent NumPy implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.kernels.sampling import uniform
from app.kernels.sampling.philox import philox, uniform_at

# Counter, key, output of philox4x32-10, from the test vectors published with the Random123 library.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
LOW = 0xFFFFFFFF


def hex_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def numpy_philox(counter: list[int], key: list[int]) -> list[int]:
    """Written from the paper with Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & LOW, (p0 >> 32) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return [c0, c1, c2, c3]


def numpy_uniform(seed: int, choice: int, position: int, vocab_size: int, purpose: int) -> np.ndarray:
    key = [seed & LOW, (seed >> 32) & LOW]
    words = [w for group in range(-(-vocab_size // 4)) for w in numpy_philox([group, position, choice, purpose], key)]
    values = np.array(words[:vocab_size], dtype=np.uint64).astype(np.float32)
    values = values * np.float32(2**-32) + np.float32(2**-33)
    return np.minimum(values, np.float32(1 - 2**-24))


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, output: str) -> None:
    assert numpy_philox(hex_words(counter), hex_words(key)) == hex_words(output)
    words = philox(
        tuple(torch.tensor([word]) for word in hex_words(counter)), tuple(torch.tensor([w]) for w in hex_words(key))
    )
    assert [int(word) for word in words] == hex_words(output)


SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]


def keys_and_positions() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[seed, row % 3] for row, seed in enumerate(SEEDS)]), torch.tensor([0, 1, 77, 2048, 131071, 5])


@pytest.mark.parametrize("vocab_size", [1, 4, 103])
def test_uniform_equals_numpy_bit_for_bit(vocab_size: int) -> None:
    keys, positions = keys_and_positions()
    sampled = uniform(keys, positions, vocab_size, purpose=3).numpy()
    assert sampled.dtype == np.float32
    for row, (seed, choice) in enumerate(keys.tolist()):
        expected = numpy_uniform(seed, choice, int(positions[row]), vocab_size, 3)
        np.testing.assert_array_equal(sampled[row], expected)


def test_a_number_depends_on_its_own_key_and_counter_only() -> None:
    keys, positions = keys_and_positions()
    batch = uniform(keys, positions, 50, purpose=0)
    for row in range(len(keys)):
        alone = uniform(keys[row : row + 1], positions[row : row + 1], 37, purpose=0)
        assert torch.equal(alone[0], batch[row, :37])
    token_ids = torch.tensor([0, 49, 3, 4, 17, 30])
    assert torch.equal(
        uniform_at(keys, positions, token_ids, purpose=0), batch.gather(1, token_ids[:, None]).squeeze(1)
    )


def test_every_part_of_the_key_changes_the_numbers() -> None:
    def draw(seed: int = 7, choice: int = 0, position: int = 5, purpose: int = 0) -> torch.Tensor:
        return uniform(torch.tensor([[seed, choice]]), torch.tensor([position]), 64, purpose)[0]

    draws = [draw(), draw(seed=8), draw(seed=7 + 2**32), draw(choice=1), draw(position=6), draw(purpose=1)]
    for index, left in enumerate(draws):
        for right in draws[index + 1 :]:
            assert (left == right).sum() == 0


def test_bounds_and_moments() -> None:
    rows = 64
    keys = torch.stack([torch.arange(rows), torch.zeros(rows, dtype=torch.long)], dim=1)
    values = uniform(keys, torch.arange(rows), 4096, purpose=0).double()
    assert 0.0 < values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1.0
    deviation = (1 / 12 / values.numel()) ** 0.5
    assert abs(values.mean() - 0.5) < 5 * deviation
    assert abs(values.var() - 1 / 12) < 1e-3
    neighbours = torch.corrcoef(torch.stack([values[:, :-1].flatten(), values[:, 1:].flatten()]))[0, 1]
    assert abs(neighbours) < 5 / values.numel() ** 0.5


@pytest.mark.gpu
def test_same_bits_on_the_gpu() -> None:
    keys, positions = keys_and_positions()
    on_gpu = uniform(keys.cuda(), positions.cuda(), 1000, purpose=0).cpu()
    assert torch.equal(on_gpu, uniform(keys, positions, 1000, purpose=0))
