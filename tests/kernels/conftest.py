"""Triton kernels run in Triton's interpreter where there is no GPU; it must be chosen before Triton is imported."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:  # importing transformers or torch._dynamo does that
        raise pytest.UsageError("Triton is imported already: set TRITON_INTERPRET=1 in tests/conftest.py")
    os.environ["TRITON_INTERPRET"] = "1"
