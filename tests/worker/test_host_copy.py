"""Contents that leave and come back: through the tensors that were there before."""

from __future__ import annotations

import torch

from app.worker.host_copy import HostCopy, empty, storages


def test_tensors_and_their_views_see_their_contents_again() -> None:
    whole = torch.arange(600, dtype=torch.float32)
    view, other = whole[100:200].view(10, 10), torch.randn(3, 7).bfloat16()
    expected, kept = view.clone(), other.clone()
    held = storages([whole, view, other])
    assert len(held) == 2
    copy = HostCopy(held)
    assert copy.num_bytes == 600 * 4 + 21 * 2
    empty(held)
    assert sum(storage.nbytes() for storage in held) == 0
    copy.restore()
    copy.close()
    torch.testing.assert_close(view, expected, rtol=0, atol=0)
    torch.testing.assert_close(other, kept, rtol=0, atol=0)
