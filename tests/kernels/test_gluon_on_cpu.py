# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kernels in Gluon that run on a CPU show what is wrong with them."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from app.kernels.whole_step.gluon_experts import read_numbers
from tests.kernels.gluon_on_cpu import OnCpu


@gluon.jit
def waiting_kernel(p_numbers):
    if gl.program_id(0) == 0:
        gl.nothing_of_the_kind()
    for _ in range(60000):
        read_numbers(p_numbers)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_waits_for_a_program_that_failed_does_not_wait_on() -> None:
    with pytest.raises(AssertionError, match=r"nothing_of_the_kind.*another thread has failed"):
        OnCpu(waiting_kernel, all_at_once=True)[(2,)](torch.zeros(1))
