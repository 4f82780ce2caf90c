"""Tensors from a sender to receivers: whatever their type; who cannot join is told why."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from app.distributed.weight_transfer import WeightReceiver, WeightSender
from app.errors import InvalidRequestError
from tests import limits

CPU = torch.device("cpu")


def test_every_receiver_gets_the_same() -> None:
    given = [torch.randn(3, 5).bfloat16(), torch.arange(7), torch.empty(0, 4), torch.tensor(2.5).half()]
    sender = WeightSender("127.0.0.1", 0, 3, timeout_s=limits.patience_s())

    def receive(rank: int) -> list[torch.Tensor]:
        receiver = WeightReceiver("127.0.0.1", sender.port, rank, 3, CPU, limits.patience_s())
        return [receiver.receive(str(tensor.dtype), list(tensor.shape)) for tensor in given]

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(receive, rank) for rank in (1, 2)]
        sender.send(given)
        for one in found:
            for tensor, expected in zip(one.result(), given, strict=True):
                torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def test_who_cannot_join_is_told_why() -> None:
    with pytest.raises(InvalidRequestError, match="has no place for rank 3"):
        WeightReceiver("127.0.0.1", 1, 3, 3, CPU)
    with pytest.raises(InvalidRequestError, match=r"cannot join 127.0.0.1:1") as refused:
        WeightReceiver("127.0.0.1", 1, 1, 2, CPU, limits.scaled_s(0.5))
    assert refused.value.param == "master_address"
