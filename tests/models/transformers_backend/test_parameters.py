"""How what transformers' own modules keep is split over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from app.errors import UnsupportedError
from app.models.transformers_backend.parameters import _split_of


def test_sums_over_ranks_that_nobody_would_add_up_are_refused() -> None:
    """A linear layer that stays transformers' own (called twice, a subclass) gives each rank its part of the sum."""
    with pytest.raises(UnsupportedError, match="splits parameters by 'rowwise'"):
        _split_of("rowwise", nn.Parameter(torch.empty(4, 4)), 2)
    assert _split_of("rowwise", nn.Parameter(torch.empty(3, 4, 4)), 2).dim == -1  # experts, which add up themselves
    assert _split_of("colwise", nn.Parameter(torch.empty(4, 4)), 2).dim == -2
