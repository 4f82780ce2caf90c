"""Triton kernels run in Triton's interpreter where there is no GPU; it must be chosen before Triton is imported."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:  # importing transformers or torch._dynamo does that
        raise pytest.UsageError("Triton is imported already: set TRITON_INTERPRET=1 in tests/conftest.py")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def rounding_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry when it rounds to e4m3 (0.496 becomes 0.25, not 0.5): that one conversion is
    PyTorch's. On a GPU nothing is replaced. Conversions from e4m3 are right, but for NaN."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) != ("fp32", "fp8e4nv"):
            return convert(data, source, target, rounding)
        numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)
