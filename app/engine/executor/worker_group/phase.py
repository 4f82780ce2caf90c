"""Tells what a worker is doing, for whoever asks from another thread."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

COMPILING = ", compiling a kernel"  # the end of an answer
_COMPILERS = ("triton.compiler", "triton.backends", "torch._inductor", "torch._dynamo")


class Phase:
    """Remembers what the worker is doing, for `describe` from another thread; entering and leaving cost next to
    nothing."""

    def __init__(self) -> None:
        self._current: tuple[str, int, float] | None = None  # what, in which thread, since when

    def of(self, what: str) -> Phase:
        """Use as a context manager around the work."""
        self._current = (what, threading.get_ident(), time.monotonic())
        return self

    def __enter__(self) -> None:
        """Begun by `of`."""

    def __exit__(self, *_: object) -> None:
        self._current = None

    def describe(self) -> str:
        """Such as: step 12 for 3.0 s, in all_reduce (parallel_groups.py:44)."""
        current = self._current
        if current is None:
            return "waiting for a step"
        what, thread, since = current
        frame = sys._current_frames().get(thread)
        return f"{what} for {time.monotonic() - since:.1f} s{_where(frame)}{COMPILING if is_compiling(frame) else ''}"


def _where(frame: FrameType | None) -> str:
    """The innermost of our own functions in a stack."""
    while frame is not None:
        code = frame.f_code
        parts = code.co_filename.split(os.sep)
        if "app" in parts and "executor" not in parts:
            return f", in {code.co_name} ({parts[-1]}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def is_compiling(frame: FrameType | None) -> bool:
    """True if a stack is inside of a compiler of kernels, which may take long and is no hang."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_COMPILERS):
            return True
        frame = frame.f_back
    return False
