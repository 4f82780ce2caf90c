"""Zeroes large memory of a CPU without touching it: pages given back to Linux come again as zeros when they are first
used, so that what nobody uses takes no memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch


def zero(tensor: torch.Tensor) -> None:
    """Make a contiguous tensor with memory of its own all zeros."""
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.itemsize
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if tensor.device.type != "cpu" or last <= first or not _give_back(first, last - first):
        tensor.zero_()
        return
    flat = tensor.view(-1).view(torch.uint8)
    flat[: first - begin].zero_()
    flat[last - begin :].zero_()


def _give_back(address: int, num_bytes: int) -> bool:
    """False where the kernel does not take the pages, as locked ones."""
    if sys.platform != "linux":  # elsewhere they may come back as they were
        return False
    advise = ctypes.CDLL(None).madvise
    return bool(advise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED) == 0)
