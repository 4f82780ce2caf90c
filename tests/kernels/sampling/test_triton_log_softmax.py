"""Logprobs of a row by one program."""

from __future__ import annotations

import pytest
import torch

from app.kernels.sampling.triton_log_softmax import log_softmax


def logits_of(rows: int, vocab: int, device: str = "cpu") -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3).to(device)


def test_against_float64() -> None:
    for vocab in (331, 5000):
        logits = logits_of(3, vocab)
        torch.testing.assert_close(log_softmax(logits).double(), logits.double().log_softmax(-1), rtol=1e-6, atol=1e-5)
    assert log_softmax(logits[:0]).shape == (0, 5000)


@pytest.mark.gpu
def test_a_row_alone_and_among_others() -> None:
    logits = logits_of(300, 128_257, "cuda")  # no two rows begin alike
    found = log_softmax(logits)
    torch.testing.assert_close(found, logits.log_softmax(-1), rtol=1e-5, atol=1e-5)
    for row in (0, 1, 2, 3, 299):
        assert torch.equal(log_softmax(logits[row : row + 1].clone()), found[row : row + 1])
