"""Convolutions within blocks: each place by itself, by hand."""

from __future__ import annotations

import pytest
import torch

from app.models.drafters.block_convolution import BlockConvolution
from tests.models.drafters.test_fit import CONTEXT
from tests.worker.spec_decode.drafters import drawn

SIZE, GROUP = 12, 4


@pytest.mark.parametrize(("taps", "width"), [(2, 5), (3, 2), (4, 1)])
def test_each_place_reads_those_before_it(taps: int, width: int) -> None:
    made = BlockConvolution(CONTEXT, SIZE, taps, GROUP)
    made.base_kernel.data.copy_(drawn(1, 2, taps, SIZE))
    projection = drawn(2, 2 * taps * (SIZE // GROUP), SIZE)
    made.kernel_projection.weight.data.copy_(projection)
    x, y = drawn(3, 3 * width, SIZE), drawn(4, 3 * width, SIZE)
    read, added = made.before(x, width)
    found = (read, made.behind(y, added, width))
    for side, source in enumerate((x, y)):
        for token in range(3 * width):
            weights = (projection @ x[token]).view(2, taps, SIZE // GROUP)[side].repeat_interleave(GROUP, dim=1)
            weights = weights + made.base_kernel[side]
            seen = range(min(taps, token % width + 1))
            expected = sum((weights[back] * source[token - back] for back in seen), torch.zeros(SIZE))
            torch.testing.assert_close(found[side][token], expected)
