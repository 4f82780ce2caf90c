"""Pieces are read in the order of the disk, a failure stops all threads, and a GPU holds what the files hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.checkpoints.tensors import reader as module
from app.checkpoints.tensors.reader import Fill, Piece, Reader
from app.errors import CheckpointError
from tests.loading.load_formats.formats import contexts, fill
from tests.tiny_models import tiny_model


def piece(file: str, offset: int, fill: Fill) -> Piece:
    return Piece(Path(file), offset, torch.float32, torch.zeros(4), fill)


def test_pieces_are_read_in_the_order_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "num_threads", lambda: 1)
    reader, order = Reader(), list[tuple[str, int]]()
    for file, offset in (("b", 0), ("a", 64), ("b", 8), ("a", 0)):
        reader.add(piece(file, offset, lambda _, place=(file, offset): order.append(place)))  # type: ignore[misc]
    reader.read()
    assert order == [("a", 0), ("a", 64), ("b", 0), ("b", 8)]


def test_a_failure_stops_all_threads() -> None:
    reader, filled = Reader(), list[torch.Tensor]()

    def fail(_: torch.Tensor) -> None:
        raise CheckpointError("broken", param="model")

    def succeed(buffer: torch.Tensor) -> None:
        sum(range(20_000))  # all of them would take many seconds
        filled.append(buffer)

    reader.add(piece("a", 0, fail))
    for offset in range(1, 60_000):
        reader.add(piece("a", offset, succeed))
    with pytest.raises(CheckpointError, match="broken"):
        reader.read()
    assert len(filled) < 59_999
    assert not reader._pieces


def test_operators_have_their_threads_again() -> None:
    before = torch.get_num_threads()
    reader = Reader()
    reader.add(piece("a", 0, lambda buffer: buffer.fill_(torch.get_num_threads())))
    reader.read()
    assert torch.get_num_threads() == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_holds_what_the_files_hold(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr("app.checkpoints.tensors.checkpoint.PIECE_BYTES", 1000)  # many turns of the two buffers
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    source = tiny_model("qwen2", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    for ctx in contexts(source, tp=2):
        place = replace(ctx, device=torch.device("cuda"), dtype=dtype)
        on_gpu = dict(fill(source, ctx=place).named_parameters())
        on_cpu = dict(fill(source, ctx=ctx).named_parameters())
        assert on_gpu.keys() == on_cpu.keys()
        assert all(torch.equal(on_gpu[name].cpu(), on_cpu[name].to(dtype)) for name in on_cpu)
