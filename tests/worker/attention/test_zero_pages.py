"""Memory of a KV cache is zero, whatever was there before, and takes nothing until it is used."""

from __future__ import annotations

import mmap
import sys

import psutil
import pytest
import torch

from app.worker.attention import zero_pages

TYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num", [0, 1, 5, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 7])
@pytest.mark.parametrize("offset", [0, 1, 64])
def test_all_of_it_and_nothing_else(dtype: torch.dtype, num: int, offset: int) -> None:
    whole = torch.full((offset + num + 9,), 7, dtype=torch.float32).to(dtype)
    zero_pages.zero(whole[offset : offset + num].view(1, num))
    expected = [7.0] * offset + [0.0] * num + [7.0] * 9
    assert whole.float().tolist() == expected


def test_where_the_kernel_refuses_it_is_zeroed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_pages, "_give_back", lambda address, num_bytes: False)
    found = torch.ones(3 * mmap.PAGESIZE)
    zero_pages.zero(found)
    assert not found.any()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is zeroed by hand")
def test_what_is_not_used_takes_no_memory() -> None:
    process, size = psutil.Process(), 256 << 20
    before = process.memory_info().rss
    tensor = torch.empty(size, dtype=torch.uint8)
    zero_pages.zero(tensor)
    assert process.memory_info().rss - before < size // 8
    tensor.fill_(1)
    assert process.memory_info().rss - before > size // 2
    zero_pages.zero(tensor)
    assert process.memory_info().rss - before < size // 8
