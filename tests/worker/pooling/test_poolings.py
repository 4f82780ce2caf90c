"""Every pooling mode by itself, on prompts cut into chunks; NumPy over the whole prompt judges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from app.worker.pooling import POOLINGS

NUM_DIMS = 6
JUDGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "cls": lambda tokens: tokens[0],
    "last": lambda tokens: tokens[-1],
    "max": lambda tokens: tokens.max(axis=0),
    "mean": lambda tokens: tokens.mean(axis=0),
    "mean_sqrt_len": lambda tokens: tokens.sum(axis=0) / np.sqrt(len(tokens)),
    "sum": lambda tokens: tokens.sum(axis=0),
    "weightedmean": lambda tokens: np.average(tokens, axis=0, weights=np.arange(1, len(tokens) + 1)),
}


@pytest.mark.parametrize("name", list(POOLINGS))
def test_chunks_give_what_the_whole_prompt_gives(name: str) -> None:
    pooling = POOLINGS.load(name)()
    rng = np.random.default_rng(0)
    lengths = [1, 7, 4]
    prompts = [rng.normal(size=(length, NUM_DIMS)).astype(np.float32) for length in lengths]
    first = [1, 3, 1]  # tokens of each that the first step brings; the second brings the rest

    def step(parts: list[np.ndarray], firsts: list[int]) -> torch.Tensor:
        starts = torch.tensor(np.cumsum([0, *map(len, parts)]))
        return pooling.of_step(torch.from_numpy(np.concatenate(parts)), starts, torch.tensor(firsts))

    vectors = list(step([prompt[:count] for prompt, count in zip(prompts, first, strict=True)], [0, 0, 0]))
    rest = [i for i, length in enumerate(lengths) if length > first[i]]
    for i, later in zip(rest, step([prompts[i][first[i] :] for i in rest], [first[i] for i in rest]), strict=True):
        vectors[i] = pooling.merge(vectors[i], later)
    found = pooling.finish(torch.stack(vectors), torch.tensor(lengths, dtype=torch.float32))
    np.testing.assert_allclose(found.numpy(), [JUDGES[name](prompt) for prompt in prompts], rtol=1e-5, atol=1e-6)
