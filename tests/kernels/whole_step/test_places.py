"""Places of a whole step's tensors, as a kernel finds them."""

from __future__ import annotations

import torch

from app.kernels.whole_step.places import LINE, NEAR, Places, addresses_of


def test_places_are_counted_from_the_tensor_that_lies_first() -> None:
    memory = torch.zeros(4, 64, 64, dtype=torch.bfloat16)
    start = (-memory.data_ptr() % LINE) // 2  # where a line begins
    lines = memory.view(-1)[start : start + 3 * 64 * 64].view(3, 64, 64)
    copied, loaded = [[lines[2], lines[1]], [lines[1], lines[2]]], [[lines[0]], [lines[2, :, 8:]]]
    places = Places.of(copied, loaded, [])
    assert places is not None
    size = 64 * 64 * 2
    assert places.lines.tolist() == [[size // LINE, 0], [0, size // LINE]]
    assert places.near.tolist() == [[-size // NEAR], [(size + 16) // NEAR]]
    assert places.reach == 2 * size // LINE
    assert places.base_of(copied).data_ptr() == lines[1].data_ptr()
    kept = [one for one in (getattr(places, name) for name in places.__slots__) if isinstance(one, torch.Tensor)]
    own = memory.untyped_storage().data_ptr()
    assert all(one.untyped_storage().data_ptr() != own for one in kept)  # or it would outlive the weights
    boxes = places.boxes(places.base_of(copied), 16, 32)
    assert (list(boxes.shape), list(boxes.block_shape)) == ([2 * 64 * 2, 32], [16, 64])
    wide = places.boxes(places.base_of(copied), 16, 3 * 64)  # the last row holds two lines
    assert list(wide.shape) == [43, 3 * 64]


def test_tensors_that_the_copy_engine_does_not_find() -> None:
    memory = torch.zeros(1 << 14, dtype=torch.bfloat16)
    start = (-memory.data_ptr() % LINE) // 2
    row, odd = memory[start : start + 4096].view(64, 64), memory[start + 8 : start + 8 + 4096].view(64, 64)
    assert Places.of([[row]], [[odd]], []) is not None
    for copied, loaded in ((odd, row), (row.t(), row), (row.float(), row), (row, memory[start + 1 :])):
        assert Places.of([[row, copied]], [[loaded]], []) is None


def test_a_cache_that_reaches_further_has_other_addresses() -> None:
    row, cache = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.bfloat16)
    assert addresses_of([[row]], [[row]], [cache[:2]]) != addresses_of([[row]], [[row]], [cache])
