"""The attention backend follows the device, and a wrong choice is named."""

from __future__ import annotations

import pytest
import torch

from app.engine.attention.backend import select_attention
from app.errors import ConfigError, UnsupportedError
from app.kernels.attention import ATTENTION_BACKENDS

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_cpu(name: str) -> None:
    assert select_attention(name, CPU) == (ATTENTION_BACKENDS.load("torch"), "attention: torch (CPU)")


def test_triton_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="attention_backend=triton needs a GPU") as raised:
        select_attention("triton", CPU)
    assert raised.value.param == "attention_backend"


def test_unknown() -> None:
    with pytest.raises(UnsupportedError, match="unknown attention backend 'flash'"):
        select_attention("flash", CPU)
