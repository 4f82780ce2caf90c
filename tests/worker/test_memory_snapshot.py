"""A dump of device memory: refused in words without a CUDA device, opened by torch's own reader where there is one."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from app.errors import UnsupportedError
from app.worker.memory_snapshot import dump_memory


def test_a_cpu_has_none(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="this engine runs on a CPU"):
        dump_memory(str(tmp_path / "dumps"), 0, torch.device("cpu"))
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_gpu_s(tmp_path: Path) -> None:
    kept = torch.ones(1 << 20, device="cuda")
    path = Path(dump_memory(str(tmp_path / "dumps"), 3, torch.device("cuda")))
    assert path.parent == tmp_path / "dumps"
    assert path.name.endswith("-rank-3.memory.pickle")
    held = sum(segment["allocated_size"] for segment in pickle.loads(path.read_bytes())["segments"])
    assert held >= kept.nbytes
