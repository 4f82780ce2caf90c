"""Steps and inputs for the tests of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.recurrent import DeltaGates, DeltaHeads, GatedNorm, ScanInputs, SpaceInputs, StateStep

SLOTS = 9
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Case:
    """Tokens of each request; which begin; which only pad. `each`, `prompts`: a static step."""

    counts: list[int]
    fresh: list[bool]
    padded: int = 0
    each: int = 0
    prompts: bool = False

    @property
    def num_live(self) -> int:
        """Tokens of requests that do not pad."""
        return sum(self.counts[: len(self.counts) - self.padded])

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


CASES = {
    "decode": Case([1, 1, 1, 1], [False, True, False, False]),
    "decode-padded": Case([1] * 6, [False] * 6, padded=2, each=1),
    "drafts-padded": Case([3] * 4, [False, True, False, False], padded=1, each=3),
    "prompts": Case([7, 63, 64, 65], [True, True, False, False]),
    "mixed": Case([1, 1, 130, 2, 1], [False, False, False, True, False]),
    "prompts-padded": Case([1, 70, 9, 20, 0], [False, True, False, False, False], padded=2, prompts=True),
}


def metadata(case: Case, device: str = DEVICE) -> AttentionMetadata:
    """The step's rows lie anywhere among the slots; padding stands for row 0, as a runner's does."""
    counts, num_rows = np.array(case.counts), len(case.counts)
    starts = np.concatenate(([0], np.cumsum(counts)))
    rows = np.random.default_rng(3).permutation(SLOTS)[:num_rows]
    live = np.arange(num_rows) < num_rows - case.padded
    before = np.where(np.array(case.fresh) | ~live, 0, 20)
    slots = np.where(np.repeat(live, counts), np.arange(starts[-1]), -1)
    leading = int(np.argmax(counts > 1)) if (counts > 1).any() else num_rows

    def on_device(array: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.from_numpy(array).to(device, dtype)

    return AttentionMetadata(
        query_start_loc=on_device(starts),
        seq_lens=on_device(before + counts),
        block_table=on_device(np.zeros((num_rows, 1))),
        slot_mapping=on_device(slots, torch.int64),
        max_query_len=int(counts.max()),
        max_seq_len=1000,
        num_decodes=leading,
        is_static=case.each > 0 or case.prompts,
        holds_prompts=case.prompts,
        host_starts=None if case.each or case.prompts else starts,
        rows=on_device(np.where(live, rows, 0)),
    )


def step_of(case: Case) -> StateStep:
    return StateStep.of(metadata(case))


def states(*shape: int, step: StateStep, seed: int = 0) -> torch.Tensor:
    """Numbers in the slots that are read, NaN in all others: also where a request begins."""
    found = torch.full((SLOTS, *shape), float("nan"))
    read = [source for source in step.sources.tolist() if source >= 0]
    found[read] = randn(len(read), *shape, seed=seed, device="cpu")
    return found.to(DEVICE)


def randn(*shape: int, seed: int, scale: float = 1.0, device: str = DEVICE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(device)


def wide(num_tokens: int, width: int, seed: int) -> torch.Tensor:
    """Columns of a wider matrix, as projections side by side are."""
    return randn(num_tokens, width + 24, seed=seed)[:, 8 : 8 + width]


def delta_inputs(
    case: Case, heads: DeltaHeads, *, by_channel: bool = False
) -> tuple[torch.Tensor, DeltaGates, GatedNorm]:
    num_tokens, h = case.num_tokens, heads.num_values
    decays = h * heads.key_dim if by_channel else h
    a, b = wide(num_tokens, decays, 2), wide(num_tokens, h, 3)
    gates = DeltaGates(a, b, randn(h, seed=4, scale=0.5), randn(decays, seed=5), 1.0 if by_channel else 1.7)
    weight = 1 + randn(heads.value_dim, seed=7, scale=0.1)
    norm = GatedNorm(wide(num_tokens, h * heads.value_dim, 6), weight, 1e-6, sigmoid=by_channel)
    return wide(num_tokens, sum(heads.widths), 1), gates, norm


def space_inputs(
    case: Case, h: int, p: int, g: int, n: int, limit: tuple[float, float] = (0.0, float("inf"))
) -> SpaceInputs:
    num_tokens = case.num_tokens
    return SpaceInputs(
        x=wide(num_tokens, h * p, 1).unflatten(1, (h, p)),
        b=wide(num_tokens, g * n, 2).unflatten(1, (g, n)),
        c=wide(num_tokens, g * n, 3).unflatten(1, (g, n)),
        dt=wide(num_tokens, h, 4),
        a_log=randn(h, seed=5, scale=0.5),
        d=randn(h, seed=6),
        dt_bias=randn(h, seed=7),
        dt_limit=limit,
    )


def scan_inputs(case: Case, d: int, n: int) -> ScanInputs:
    num_tokens = case.num_tokens
    return ScanInputs(
        x=wide(num_tokens, d, 1),
        b=wide(num_tokens, n, 2),
        c=wide(num_tokens, n, 3),
        dt=wide(num_tokens, d, 4),
        a_log=randn(d, n, seed=5, scale=0.5),
        d=randn(d, seed=6),
        dt_bias=randn(d, seed=7),
    )
