"""Chooses which device, type and how many threads a worker uses, and says why."""

from __future__ import annotations

import os

import torch

from app.backends import OWN_PROCESS
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.platforms import platform_of, select_platform

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_device(name: str, local_rank: int) -> tuple[torch.device, str]:
    """The device that `config.device` means here, and a line that says so. ConfigError: a GPU that is not there."""
    platform = select_platform(name)
    device = platform.device(local_rank)
    if platform.is_async:
        return device, f"device: {device} ({platform.describe(device)})"
    return device, f"device: {platform.name} ({'no GPU visible' if name == 'auto' else 'as configured'})"


def select_dtype(name: str, device: torch.device, info: ModelInfo) -> tuple[torch.dtype, str]:
    """The compute type, and a line that says so. ConfigError: a checkpoint of a type that we cannot compute in."""
    if name != "auto":
        return DTYPES[name], f"dtype: {name} (as configured)"
    platform = platform_of(device)
    if platform.dtype is not None:
        hint = "; weights of few bits want --dtype bfloat16 here" if info.quantization_scheme else ""
        return DTYPES[platform.dtype], f"dtype: {platform.dtype} ({platform.label}{hint})"
    if info.dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ConfigError(f"the checkpoint's type is {info.dtype!r}; set dtype to one of {known}", param="dtype")
    return DTYPES[info.dtype], f"dtype: {info.dtype} (the checkpoint's)"


def select_state_dtype(name: str, info: ModelInfo) -> torch.dtype:
    """The type of recurrent states: as configured, as the checkpoint asks, or fp32."""
    return DTYPES[info.state_dtype if name == "auto" else name]


def num_threads(config: EngineConfig) -> int:
    """CPU threads of the worker: as configured, or one for each core that this process may use.

    A worker of its own leaves one core to the ingress and the engine beside it: threads that wait for a core hold up
    all the others of a product (on two cores, 64 streams gain a quarter that way). Several workers share the rest, as
    if all of them were on this node.
    """
    cores = len(os.sched_getaffinity(0))
    default = cores if config.executor in OWN_PROCESS else max(1, (cores - 1) // config.world_size)
    return config.num_threads or default


def enter_thread(device: torch.device, threads: int) -> None:
    """Settings that hold for one thread only: whoever calls the worker gets them first.

    Set outright, because a process that Ray started may have OMP_NUM_THREADS=1.
    """
    platform_of(device).enter_thread(device, threads)
