"""Steps that no request asked for: to measure memory, and to compile and warm what the first real step needs."""

from __future__ import annotations

import numpy as np
import torch

from app.config import EngineConfig
from app.engine.sampling_params import SamplingParams
from app.engine.step import NewRequest, SchedulerOutput
from app.engine.worker.model_runner import ModelRunner
from app.kernels.attention import AttentionMetadata


def dummy_forward(
    runner: ModelRunner, counts: list[int], context: int, block_size: int, device: torch.device, *, cascade: bool = True
) -> torch.Tensor:
    """Hidden states [T, C] of requests with `counts[i]` tokens after `context` tokens each; with `cascade`, decodes
    share prefixes if they may at all.

    Reads block 0 throughout and writes nothing.
    """
    lengths = np.array(counts, dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    longest = int(lengths.max()) + context
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths) + context
    shape = (len(counts), -(-longest // block_size))
    meta = AttentionMetadata(
        query_start_loc=torch.from_numpy(starts).int().to(device),
        seq_lens=torch.from_numpy(lengths + context).int().to(device),
        block_table=torch.zeros(shape, dtype=torch.int32, device=device),
        slot_mapping=torch.full((int(starts[-1]),), -1, dtype=torch.int64, device=device),
        max_query_len=int(lengths.max()),
        max_seq_len=longest,
        num_decodes=len(counts) if int(lengths.max()) == 1 else 0,
        cascade=cascade and runner.cascade is not None,
    )
    input_ids = torch.zeros(int(starts[-1]), dtype=torch.int32, device=device)
    return runner.forward(input_ids, torch.from_numpy(positions).to(device), meta)


def full_step(
    runner: ModelRunner,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int,
    max_model_len: int,
    device: torch.device,
) -> None:
    """As many tokens, logits and sampling buffers as a step can ever have."""
    requests = max(1, min(max_num_seqs, max_num_batched_tokens))
    counts = [min(len(part), max_model_len) for part in np.array_split(np.arange(max_num_batched_tokens), requests)]
    hidden = dummy_forward(runner, counts, 0, block_size, device)
    if not runner.is_last_stage:
        return
    logits = runner.logits(hidden[:requests].contiguous())
    logits.softmax(dim=-1).sort(dim=-1)  # what top_p needs


def warm_steps(config: EngineConfig, max_model_len: int, *, on_gpu: bool) -> list[tuple[list[int], int]]:
    """(tokens of each request, context before them) of the steps that compile what real ones need. The same in all
    stages of a pipeline, whatever their layers are, as each step is sent from one to the next."""
    length = min(config.max_num_batched_tokens, max_model_len, 64)
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    batch = min(most, 4)
    steps = [([1], 0), ([1] * batch, 0), ([length], 0)]
    if on_gpu:
        steps += [([1], max_model_len - 1), ([1] * batch, max_model_len - 1)]
        steps += [([1] * min(most, 64), max_model_len - 1)] if config.cascade_attention != "off" else []
    return steps


def warm_letters(runner: ModelRunner) -> None:
    """A small request from its first letter to its last, so that no real one pays for what is loaded on first use.

    It writes into block 0, whose contents nobody reads before having written them.
    """
    params = SamplingParams(seed=0, max_tokens=2, temperature=1.0, top_p=0.9)
    prompt = np.zeros(2, dtype=np.int32)
    enter = NewRequest(0, prompt, len(prompt), 0, [0], params, 0, (), ())
    row, samples = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.bool_)
    for count, requests, freed in ((2, [enter], []), (1, [], []), (0, [], [0])):
        rows = row[: min(count, 1)]
        counts = np.full(len(rows), count, dtype=np.int32)
        letter = SchedulerOutput(-1, rows, counts, samples[: len(rows)], requests, freed_rows=freed)
        runner.execute(letter).finish()
