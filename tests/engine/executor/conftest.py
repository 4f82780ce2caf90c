"""Where ranks that compute on GPUs find them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.one_gpu import worker_groups_on_one_gpu


@pytest.fixture(
    params=[
        pytest.param(True, marks=pytest.mark.gpu, id="one-gpu"),
        pytest.param(False, marks=pytest.mark.multi_gpu, id="gpus"),
    ]
)
def one_gpu(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the ranks share one GPU."""
    with worker_groups_on_one_gpu(request.param):
        yield request.param
