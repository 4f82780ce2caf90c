"""Host arrays become tensors of the same values, whatever their layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.platforms.to_device import to_device


def test_values_and_layout() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    for view in (array, array.T, array[:, ::2]):
        tensor = to_device(view, torch.device("cpu"))
        assert tensor.is_contiguous()
        np.testing.assert_array_equal(tensor.numpy(), view)


def test_of_memory_that_nobody_may_write_to_there_is_a_copy() -> None:
    data = bytes(range(24))
    for kind in (np.uint8, np.float32):
        array = np.frombuffer(data, kind).reshape(2, -1)
        tensor = to_device(array, torch.device("cpu"))
        np.testing.assert_array_equal(tensor.numpy(), array)
        tensor.zero_()
        assert data == bytes(range(24))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_too() -> None:
    """Many, one behind the other: memory that is sent from is not given away before it was read."""
    arrays = [np.frombuffer(bytes([i]) * (1 << 22), np.uint8) for i in range(24)]
    sent = [to_device(array, torch.device("cuda")) for array in arrays]
    for i, tensor in enumerate(sent):
        assert bool((tensor == i).all())
