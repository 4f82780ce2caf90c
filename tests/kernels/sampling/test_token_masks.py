"""Token masks against NumPy, on the CPU path and in Triton (interpreter, or a real GPU)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from app.kernels.sampling import TOKEN_MASKS, token_masks, triton_token_masks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATHS = [
    pytest.param(token_masks.apply_token_masks, id="torch"),
    pytest.param(triton_token_masks.apply_token_masks, id="triton"),
]


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "num_words", "indices"),
    [
        (1, 1, 1, [0]),
        (3, 31, 1, [1]),
        (4, 64, 2, [0, 3]),
        (5, 1025, 33, [4, 0, 2]),
        (2, 2500, 79, [1]),
        (2, 100, 9, [0, 1]),  # more words than the logits have tokens
        (2, 100, 2, [1]),  # fewer: the rest is forbidden
        (3, 40, 2, []),
    ],
)
def test_equal_to_numpy(
    apply: Callable[..., None], num_rows: int, vocab_size: int, num_words: int, indices: list[int]
) -> None:
    generator = np.random.default_rng(vocab_size)
    words = generator.integers(-(2**31), 2**31, (len(indices), num_words), dtype=np.int64).astype(np.int32)
    logits = generator.standard_normal((num_rows, vocab_size + 7)).astype(np.float32)
    expected = logits.copy()
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)[:, :vocab_size]
    bits = np.pad(bits, ((0, 0), (0, vocab_size - bits.shape[1])))
    for row, allowed in zip(indices, bits, strict=True):
        expected[row, :vocab_size][~allowed] = -np.inf
    found = torch.from_numpy(logits.copy()).to(DEVICE)
    view = found[:, :vocab_size]  # rows of a wider buffer
    apply(view, torch.tensor(indices, dtype=torch.int32, device=DEVICE), torch.from_numpy(words).to(DEVICE))
    np.testing.assert_array_equal(found.cpu().numpy(), expected)


def test_the_device_chooses_the_path() -> None:
    logits = torch.zeros(1, 40)
    ours = TOKEN_MASKS.on(logits.device)
    assert ours is token_masks.apply_token_masks
    ours(logits, torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32))
    assert torch.isinf(logits).all()
