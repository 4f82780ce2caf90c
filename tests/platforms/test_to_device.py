"""Host arrays become tensors of the same values, whatever their layout."""

from __future__ import annotations

import numpy as np
import torch

from app.platforms.to_device import to_device


def test_values_and_layout() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    for view in (array, array.T, array[:, ::2]):
        tensor = to_device(view, torch.device("cpu"))
        assert tensor.is_contiguous()
        np.testing.assert_array_equal(tensor.numpy(), view)
