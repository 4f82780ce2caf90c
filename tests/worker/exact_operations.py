"""Watches the operations of a model's steps: `deterministic` allows those whose results for a number, or for a row, are
the same bits whatever lies beside it.

Allowed are IEEE 754's own operations, choices and copies, and what works row by row. PyTorch's `exp`, `sigmoid`, `gelu`
or `rsqrt` are not: they take another code for the end of a tensor. In bf16 the next rounding hides that for all but a
few numbers in a thousand, so that comparing logits may find nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.worker.forward_pass import ForwardPass

ROUNDED_ALIKE = {
    *("reciprocal", "round", "round_", "abs"),
    "add",
    "add_",
    "sub",
    "sub_",
    "rsub",
    "mul",
    "mul_",
    "div",
    "div_",
    "neg",
}
CHOICES = {
    *("clamp", "clamp_", "relu", "min", "amax", "sort", "gather", "where", "masked_fill", "masked_fill_"),
    *("eq", "ge", "gt", "le", "lt", "equal", "__ior__", "nonzero_numpy", "scatter", "floor_divide", "remainder"),
    *("__and__", "bitwise_and_", "__lshift__", "__rshift__", "arange", "item", "count_nonzero"),
}
COPIES = {
    *(
        "alias",
        "cat",
        "chunk",
        "clone",
        "contiguous",
        "copy_",
        "embedding",
        "empty",
        "empty_like",
        "expand",
        "expand_as",
    ),
    *(
        "flatten",
        "index",
        "index_put_",
        "index_select",
        "new_empty",
        "new_full",
        "new_zeros",
        "pad",
        "permute",
        "repeat_interleave",
        "reshape",
    ),
    *("resolve_conj", "resolve_neg", "roll", "select", "slice", "split_with_sizes", "squeeze", "stack", "t", "to"),
    *("transpose", "unbind", "unsqueeze", "view", "zeros", "zeros_like", "rand"),
}
BY_ROWS = {"layer_norm"}
_ROWS = (1, 16, 128)
_PRODUCTS = ("linear", "mm", "_linear_pointwise", "qlinear_pointwise", "_weight_int4pack_mm_for_cpu")
OF_BLOCKS = {**dict.fromkeys(_PRODUCTS, _ROWS), "bmm": range(16, 1 << 10, 16)}  # of these numbers of rows alone
ALLOWED = ROUNDED_ALIKE | CHOICES | COPIES | BY_ROWS


class Watch(TorchDispatchMode):
    """Keeps the names of the operations within it that are not allowed, with the shapes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen, self.refused = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        self.num_seen += 1
        rows = OF_BLOCKS.get(name)
        if name not in ALLOWED and (rows is None or args[0].shape[-2] not in rows):
            self.refused.add(f"{name} of {[tuple(one.shape) for one in args if isinstance(one, torch.Tensor)]}")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watches hidden states and logits of the workers that start within."""
    watch = Watch()
    with monkeypatch.context() as patch:
        for name in ("compute", "raw_logits"):
            patch.setattr(ForwardPass, name, _within(watch, getattr(ForwardPass, name)))
        yield watch


def _within(watch: Watch, call: Any) -> Any:
    def within(*args: Any) -> Any:
        with watch:
            return call(*args)

    return within
