"""Which device, type and how many threads a worker uses, and why."""

from __future__ import annotations

import os

import torch

from app.backends import OWN_PROCESS
from app.config import EngineConfig
from app.engine.model_info import ModelInfo
from app.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_device(name: str, local_rank: int) -> tuple[torch.device, str]:
    """The device that `config.device` means here, and a line that says so. ConfigError: cuda without a GPU."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and visible == 0):
        reason = "as configured" if name == "cpu" else "no GPU visible"
        return torch.device("cpu"), f"device: cpu ({reason})"
    if local_rank >= visible:
        raise ConfigError(f"device=cuda: rank {local_rank} needs a GPU, {visible} visible", param="device")
    device = torch.device("cuda", local_rank)
    return device, f"device: {device} ({torch.cuda.get_device_name(device)})"


def select_dtype(name: str, device: torch.device, info: ModelInfo) -> tuple[torch.dtype, str]:
    """The compute type, and a line that says so. ConfigError: a checkpoint of a type that we cannot compute in."""
    if name != "auto":
        return DTYPES[name], f"dtype: {name} (as configured)"
    if device.type == "cpu":
        return torch.float32, "dtype: float32 (CPU)"
    if info.dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ConfigError(f"the checkpoint's type is {info.dtype!r}; set dtype to one of {known}", param="dtype")
    return DTYPES[info.dtype], f"dtype: {info.dtype} (the checkpoint's)"


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
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads)
