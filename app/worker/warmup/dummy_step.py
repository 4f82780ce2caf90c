"""Steps that no request asked for: to measure memory, and to compile and warm what the first real step needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.sampling import GUMBEL_ARGMAX, SAMPLE_TOKENS, TOKEN_MASKS
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from app.worker.forward_pass import ForwardPass
from app.worker.graphs import cuda_graphs
from app.worker.graphs.prompt_step import PromptStep
from app.worker.graphs.static_step import StaticStep, StepKey
from app.worker.model_runner import ModelRunner
from app.worker.warmup.plan import DummyStep

GENERATED = SamplingParams(seed=0, max_tokens=2, temperature=1.0, top_p=0.9)


def dummy_forward(
    forward: ForwardPass, step: DummyStep, device: torch.device, *, shares_prefixes: bool
) -> torch.Tensor:
    """Hidden states [T, C]. Reads block 0 throughout and writes nothing."""
    lengths = np.array(step.counts, dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    longest = int(lengths.max()) + step.context
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths) + step.context
    shape = (len(lengths), -(-longest // forward.cache.spec.block_size))
    table = torch.zeros(shape, dtype=torch.int32, device=device)
    slots = torch.full((int(starts[-1]),), -1, dtype=torch.int64, device=device)
    meta = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts).int().to(device),
        seq_lens=torch.from_numpy(lengths + step.context).int().to(device),
        block_table=table,
        slot_mapping=slots,
        max_query_len=int(lengths.max()),
        max_seq_len=longest,
        num_decodes=len(lengths) if int(lengths.max()) == 1 else 0,
        cascade=step.cascade and shares_prefixes,
        host_starts=starts,
        host_lens=lengths + step.context,
        more_tables=((table, slots),) * (len(forward.cache.spec.windows) - 1),
        rows=torch.zeros(len(lengths), dtype=torch.int32, device=device),
    )
    input_ids = torch.zeros(int(starts[-1]), dtype=torch.int32, device=device)
    places = torch.from_numpy(positions).to(device)
    return forward.run(input_ids, forward.context(places, meta, forward.receive(len(positions)))).last


def launch_static(step: StaticStep) -> None:
    """Launches what a capture will launch, at sizes that have all its kernels between them."""
    step.inputs.pad_all()
    by_kind: dict[StepKey, list[int]] = {}
    for key in step.keys:
        by_kind.setdefault(key.kind, []).insert(0, key.size)
    launched: set[StepKey] = set()
    for kind, sizes in by_kind.items():
        for size in cuda_graphs.telling_sizes(sizes):
            key = step.forward_key(kind._replace(size=size))
            if key not in launched:
                launched.add(key)
                step.forward(key)
        if step.sent is None:
            step.sample(step.sample_key(kind._replace(size=sizes[0])))


def launch_prompts(step: PromptStep) -> None:
    """The largest step with prompts of each kind that may be captured: the plan's own have the kernels of all sizes. No
    kernel is compiled for how many rows decode, so those that only fill rounds have the others'."""
    for key in step.keys:
        if key.tokens == step.sizes[-1]:
            step.pad_all(key)
            step.run(key)


def draw(logits: torch.Tensor) -> None:
    """The kernels of the steps that sample apart: fp32 logits [N, V], which are spoilt."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    ones = torch.ones(num_rows, device=device)
    keys = torch.zeros(num_rows, 2, dtype=torch.int64, device=device)
    words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
    TOKEN_MASKS.on(device)(logits, words[0, :1], words)
    top_k = words[0, :1].expand(num_rows).contiguous()
    SAMPLE_TOKENS.on(device)(logits, ones, top_k, ones, ones, keys, keys[:, 0])
    GUMBEL_ARGMAX.on(device)(logits, keys, keys[:, 0])


def run_requests(
    runner: ModelRunner,
    prompts: Sequence[int],
    block_size: int,
    num_groups: int,
    pooling: PoolingParams | None = None,
    num_drafts: int = 0,
) -> list[ModelRunnerOutput]:
    """Requests with prompts of these lengths from their first step message to their last: in one step, and where they
    generate in a second one, each with `num_drafts` drafts behind it. They write into the first blocks, whose contents
    nobody reads before having written them.
    """
    if not prompts:
        return []
    requests, first = [], 0
    for row, length in enumerate(prompts):
        blocks = list(range(first, first + -(-length // block_size) * num_groups))
        spec = EngineRequest("warm-up", [], GENERATED if pooling is None else pooling)
        requests.append(NewRequest(row, np.zeros(length, dtype=np.int32), length, 0, blocks, spec, ()))
        first += len(blocks)
    rows, counts = np.arange(len(prompts), dtype=np.int32), np.array(prompts, dtype=np.int32)
    samples, none = np.ones(len(rows), dtype=np.bool_), rows[:0]
    steps = [SchedulerOutput(-1, rows, counts, samples, requests, num_proposed=num_drafts)]
    if pooling is None:
        steps.append(SchedulerOutput(-1, rows, np.ones_like(counts), samples, num_proposed=num_drafts))
    steps.append(SchedulerOutput(-1, none, none, samples[:0], freed_rows=rows.tolist()))
    return [runner.execute(step).finish() for step in steps]
