"""Which platform a device belongs to, what it says of it, and how one that is not there is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from pydantic import ValidationError

from app.backends import ATTENTION_BACKENDS, ON_HOST, PLATFORMS
from app.config.engine import EngineConfig
from app.errors import ConfigError, UnsupportedError
from app.kernels.fused import FUSED_OPS
from app.kernels.gemm import LINEAR_OPS
from app.kernels.rows import BEGIN_STEP
from app.kernels.sampling import GUMBEL_ARGMAX, SAMPLE_TOKENS, TOKEN_MASKS
from app.platforms import _of_type, platform_of, select_platform
from app.platforms.base import Platform
from app.platforms.cpu import Cpu
from app.platforms.cuda import Cuda
from app.platforms.rocm import Rocm

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KERNELS = (FUSED_OPS, LINEAR_OPS, BEGIN_STEP, GUMBEL_ARGMAX, SAMPLE_TOKENS, TOKEN_MASKS)


@pytest.fixture(params=["cuda", "rocm"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    """As on a machine with two GPUs of that kind."""
    monkeypatch.setattr(torch.version, "hip", "7.0" if request.param == "rocm" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _of_type.cache_clear()
    yield PLATFORMS.load(request.param)()
    _of_type.cache_clear()


def test_auto_takes_the_gpu_that_is_there(gpu: Platform) -> None:
    assert type(select_platform("auto")) is type(gpu)
    assert type(platform_of(GPU)) is type(gpu)
    assert type(platform_of(CPU)) is Cpu
    assert select_platform("auto").device(1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=f"device={gpu.name}: rank 2 needs a GPU, 2 visible"):
        gpu.device(2)


def test_a_gpu_of_the_other_kind_is_not_there(gpu: Platform) -> None:
    other = Rocm() if type(gpu) is Cuda else Cuda()
    with pytest.raises(ConfigError, match=f"device={other.name}: rank 0 needs a GPU, 0 visible"):
        other.device(0)


@pytest.mark.parametrize(("architecture", "has"), [("gfx942:sramecc+:xnack-", False), ("gfx950", True)])
def test_fp8_of_amd(architecture: str, has: bool) -> None:
    properties = mock.Mock(gcnArchName=architecture)
    with mock.patch("torch.cuda.get_device_properties", return_value=properties):
        refusal = Rocm().fp8_refusal(GPU)
    assert refusal is None if has else refusal == "gfx942 has no fp8 numbers of the kind e4m3fn"
    assert Rocm().capability(GPU) == (0, 0)  # nothing of Hopper's is launched


def test_without_a_gpu_auto_is_the_cpu() -> None:
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert type(select_platform("auto")) is Cpu
    assert type(platform_of(torch.device("meta"))) is Cpu


def test_each_names_what_is_there() -> None:
    for name in PLATFORMS:
        platform: Platform = PLATFORMS.load(name)()
        assert platform.name == name
        assert platform.attention_backend in ATTENTION_BACKENDS
        for table in KERNELS:
            ordinary = [one for one in table.candidates if not one.is_exact]
            wanted = next(one for one in ordinary if one.needs.kernels in (None, platform.kernels))
            assert (wanted.needs.kernels or "torch") == platform.kernels
        assert platform.is_async is (name not in ON_HOST)


def test_an_unknown_one_is_refused_in_a_line() -> None:
    with pytest.raises(ValidationError, match="unknown device 'hpu-x'; known: auto, cpu, cuda, rocm"):
        EngineConfig(device="hpu-x")
    with pytest.raises(UnsupportedError, match="unknown device 'tpu'; known: cpu, cuda, rocm"):
        select_platform("tpu")
    with pytest.raises(UnsupportedError, match="this engine runs on a CPU"):
        Cpu().dump_memory(Path("nowhere"))
