"""No step of a model with latent attention compiles a merge of parts that the start has not compiled."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from app.config.engine import EngineConfig
from app.kernels.mla.gluon_attend import TILE as MANY_ROWS
from app.kernels.mla.gluon_few_rows import TILE as FEW_ROWS
from app.kernels.mla.triton_attend import merge_tile
from app.kernels.mla.triton_schedule import most_jobs
from app.layers.latent_step import least_expanded
from app.worker.warmup.plan import compiled_steps

SHORT = least_expanded(512, 128, 128) - 1  # DeepSeek's sizes
MULTIPROCESSORS = 132
MOST_REQUESTS, MOST_TOKENS = 256, 8192


def merge_of(num_requests: int, num_tokens: int, longest: int, num_heads: int) -> tuple[int, ...]:
    """What a step launches, by what it is compiled for."""
    tile = FEW_ROWS if longest * num_heads <= FEW_ROWS.rows else MANY_ROWS
    num_jobs = most_jobs(num_requests, num_tokens, num_heads, tile.rows)
    return tile.rows, *merge_tile(num_jobs, tile.programs * MULTIPROCESSORS)


def all_steps() -> Iterable[tuple[int, int, int]]:
    """(requests, their tokens, those of the longest) of steps whose requests all bring few tokens."""
    for count in range(1, MOST_REQUESTS + 1):
        yield count, count, 1
        for longest in (2, 5, SHORT // 2, SHORT):
            for others in {1, longest}:
                tokens = (count - 1) * others + longest
                if tokens <= MOST_TOKENS:
                    yield count, tokens, longest


@pytest.mark.parametrize("num_heads", [8, 16, 32, 64, 128])
def test_none_is_compiled_in_the_midst_of_traffic(num_heads: int) -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=MOST_TOKENS, max_num_seqs=MOST_REQUESTS)
    steps = compiled_steps(config, 1 << 15, compiles=True, has_experts=True, short_query=SHORT)
    absorbed = [step.counts for step in steps if max(step.counts) <= SHORT]
    at_start = {merge_of(len(counts), sum(counts), max(counts), num_heads) for counts in absorbed}
    assert at_start >= {merge_of(*step, num_heads) for step in all_steps()}


def test_mixed_steps_fit_the_engine() -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=160, max_num_seqs=64)
    steps = compiled_steps(config, 1 << 15, compiles=True, short_query=SHORT)
    mixed = [step.counts for step in steps if len(set(step.counts)) > 1]
    assert [len(counts) for counts in mixed] == [2, 3, 5, 9, 17, 33]
    assert all(sum(counts) <= 160 for counts in mixed)
