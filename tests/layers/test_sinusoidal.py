"""Sines and cosines as positions; XGLM's and Marian's in transformers are the judges."""

from __future__ import annotations

import pytest
import torch
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from app.layers.sinusoidal import SinusoidalPositions


@pytest.mark.parametrize(("size", "empty_row"), [(16, 1), (17, 5)])
def test_rows_are_those_of_transformers(size: int, empty_row: int) -> None:
    expected = XGLMSinusoidalPositionalEmbedding.get_embedding(40, size, empty_row)
    found = SinusoidalPositions(40, size, empty_row, torch.float32, torch.device("cpu"))(torch.arange(40))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert not found[empty_row].any()


def test_waves_of_the_paper() -> None:
    expected = MarianSinusoidalPositionalEmbedding(40, 16).create_weight()
    found = SinusoidalPositions(40, 16, -1, torch.float32, torch.device("cpu"), reaches_last=False)(torch.arange(40))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
