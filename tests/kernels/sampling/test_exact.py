"""Draws and logprobs row by row: those of the reference, and a row's bits alone and among others."""

from __future__ import annotations

import torch

from app.kernels.sampling import GUMBEL_ARGMAX, LOG_SOFTMAX, SAMPLE_TOKENS, exact, reference

CPU = torch.device("cpu")
ROWS, VOCAB = 12, 1037


def logits_of(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_a_cpu_has_them_only_where_they_are_asked_for() -> None:
    for table, name in (
        (GUMBEL_ARGMAX, "gumbel_argmax"),
        (SAMPLE_TOKENS, "sample_tokens"),
        (LOG_SOFTMAX, "log_softmax"),
    ):
        assert table.on(CPU, exact=True) is getattr(exact, name)
        assert table.on(CPU) is getattr(reference, name)


def test_logprobs() -> None:
    logits = logits_of()
    found = exact.log_softmax(logits)
    torch.testing.assert_close(found.double(), logits.double().log_softmax(-1), rtol=1e-6, atol=1e-6)
    for row in (0, 5, ROWS - 1):
        assert torch.equal(exact.log_softmax(logits[row : row + 1]), found[row : row + 1])
    assert exact.log_softmax(logits[:0]).shape == (0, VOCAB)


def test_draws() -> None:
    logits, keys = logits_of(), torch.arange(2 * ROWS).view(ROWS, 2)
    positions = torch.arange(ROWS) + 3
    found = exact.gumbel_argmax(logits, keys, positions)
    assert found.tolist() == reference.gumbel_argmax(logits, keys, positions).tolist()
    assert exact.gumbel_argmax(logits[7:8], keys[7:8], positions[7:8]).tolist() == found[7:8].tolist()
    temperature = torch.tensor([0.0, 0.7] * (ROWS // 2))
    top_k, top_p = torch.arange(ROWS).int() % 5, torch.linspace(0.3, 1.0, ROWS)
    min_p = torch.zeros(ROWS)
    args = (logits, temperature, top_k, top_p, min_p, keys, positions)
    token_ids, logprobs = exact.sample_tokens(*args)
    expected = reference.sample_tokens(*args)
    assert token_ids.tolist() == expected[0].tolist()
    torch.testing.assert_close(logprobs, expected[1], rtol=1e-6, atol=1e-6)
    alone = exact.sample_tokens(*(tensor[9:10] for tensor in args))
    assert (alone[0].tolist(), alone[1].tolist()) == (token_ids[9:10].tolist(), logprobs[9:10].tolist())
