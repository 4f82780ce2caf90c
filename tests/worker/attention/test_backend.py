"""The attention backend follows the device, and a wrong choice is named."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch

from app.backends import ATTENTION_BACKENDS
from app.errors import ConfigError, UnsupportedError
from app.kernels.attention import AttentionOps, reference
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_cpu(name: str) -> None:
    assert select_attention(name, CPU) == (ATTENTION_BACKENDS.load("torch"), "attention: torch (CPU)")


def test_exact_attention() -> None:
    ops, note = select_attention("auto", CPU, exact=True)
    assert (ops, note) == (ATTENTION_BACKENDS.load("torch_exact"), "attention: torch_exact (CPU)")
    assert select_attention("auto", torch.device("cuda"), exact=True)[0] is ATTENTION_BACKENDS.load("triton_exact")
    with pytest.raises(ConfigError, match="attention_backend=torch is not exact, which deterministic wants; use auto"):
        select_attention("torch", CPU, exact=True)


def test_a_gpu_says_why_not_the_others() -> None:
    ops, note = select_attention("auto", torch.device("cuda"))
    assert ops is ATTENTION_BACKENDS.load("triton")
    why = "it plans each step on the host"
    exact = "not torch_exact: needs a CPU; not triton_exact: it reads shared prefixes once for each request"
    assert note == f"attention: triton (GPU; not torch: {why}; not flex: {why}; {exact})"


def test_what_a_layer_wants_and_a_backend_lacks_is_named() -> None:
    ops = dataclasses.replace(reference.OPS, name="partial", features=frozenset({"soft_cap"}))
    ops.require(soft_cap=True, alibi=False)
    with pytest.raises(ConfigError, match="attention_backend=partial: it does not serve ALiBi, which this"):
        ops.require(soft_cap=True, alibi=True)


def test_triton_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="attention_backend=triton needs a GPU") as raised:
        select_attention("triton", CPU)
    assert raised.value.param == "attention_backend"


def test_unknown() -> None:
    with pytest.raises(UnsupportedError, match="unknown attention backend 'flash'"):
        select_attention("flash", CPU)


def test_a_backend_says_where_it_runs_and_the_name_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file and one line; here the file is this one."""
    elsewhere = AttentionOps(print, print, reference.paged_attention, device_types=("cuda",), is_capturable=True)
    here = dataclasses.replace(elsewhere, device_types=("cpu",))
    for name, ops in (("gpu_only", elsewhere), ("cpu_only", here)):
        monkeypatch.setitem(ATTENTION_BACKENDS._table, name, f"made_up:{name}")
        monkeypatch.setitem(sys.modules, "made_up", sys.modules.get("made_up", types.ModuleType("made_up")))
        monkeypatch.setattr(sys.modules["made_up"], name, ops, raising=False)
    with pytest.raises(ConfigError, match="attention_backend=gpu_only needs a GPU"):
        select_attention("gpu_only", CPU)
    named = dataclasses.replace(here, name="cpu_only")
    assert select_attention("cpu_only", CPU) == (named, "attention: cpu_only (CPU)")
