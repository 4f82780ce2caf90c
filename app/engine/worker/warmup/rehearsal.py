"""A start's and a day's launches in advance, so that their kernels are compiled side by side and not one by one.

Nothing here computes anything of use: inside `compile_ahead` kernels do not run, and what torch computes from their
uninitialised results is thrown away. So no value that a kernel would have written may serve as an index: steps read
token 0 throughout, and draws go where only the padding of a static step writes (decode_inputs.py) and nobody reads.
"""

from __future__ import annotations

import logging
import time

import torch

from app.config import EngineConfig
from app.engine.worker.graphs.graph_setup import GraphSetup
from app.engine.worker.model_runner import ModelRunner
from app.engine.worker.warmup.dummy_step import dummy_forward
from app.kernels.sampling import apply_token_masks, gumbel_argmax, sample_tokens

logger = logging.getLogger("manta.worker")

# Kernels are chosen by powers of two; past a few hundred tokens by nothing any more.
DECODES = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILLS = (16, 32, 64, 128, 1024)


def rehearse(
    config: EngineConfig, runner: ModelRunner, graphs: GraphSetup, max_model_len: int, device: torch.device
) -> None:
    """Load every kernel that the start and ordinary steps will launch; on a GPU only. Needs a block of KV cache.

    Collective over all ranks: of several, one that fails raises, as the others wait for it. A single one goes on: what
    failed here will fail again where it is met and handled.
    """
    if device.type != "cuda":
        return
    from app.kernels.compile_ahead import compile_ahead  # Triton, which a CPU does without

    began = time.monotonic()
    try:
        with compile_ahead(device) as ahead:
            launch_all(config, runner, graphs, max_model_len, device)
        logger.info("kernels: %d loaded, %d failed, %.1f s", ahead.compiled, ahead.failed, time.monotonic() - began)
        torch.cuda.synchronize(device)
    except Exception as error:
        if config.world_size > 1:
            raise
        logger.warning("kernels are compiled when they are met: the rehearsal failed", exc_info=error)


def launch_all(
    config: EngineConfig, runner: ModelRunner, graphs: GraphSetup, max_model_len: int, device: torch.device
) -> None:
    """The steps and draws themselves."""
    graphs.rehearse()
    for counts, context, cascade in rehearsed_steps(config, max_model_len):
        hidden = dummy_forward(runner, counts, context, config.block_size, device, cascade=cascade)
        if runner.is_last_stage:
            draw(runner.logits(hidden[: len(counts)].contiguous()))


def rehearsed_steps(config: EngineConfig, max_model_len: int) -> list[tuple[list[int], int, bool]]:
    """(tokens of each request, context before them, whether decodes may share prefixes) of steps that have all kernels
    of ordinary ones between them. The same in all stages of a pipeline, as each step is sent from one to the next."""
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    longest = min(config.max_num_batched_tokens, max_model_len)
    decodes = sorted({min(count, most) for count in (*DECODES, most)})
    prefills = sorted({min(length, longest) for length in PREFILLS} - {1})
    shared = [count for count in decodes if count > 1 and config.cascade_attention != "off"]
    if config.attention_backend == "torch":  # which really computes
        return [([count], 0, False) for count in (*decodes[:1], *prefills)]
    steps = [([1] * count, max_model_len - 1, False) for count in decodes]
    steps += [([1] * count, max_model_len - 1, True) for count in shared]
    steps += [([1] * count, 0, False) for count in decodes[:2]]
    return steps + [([length], 0, False) for length in prefills]


def draw(logits: torch.Tensor) -> None:
    """The kernels of the steps that sample apart: fp32 logits [N, V], which are spoilt."""
    num_rows, vocab_size = logits.shape
    ones = torch.ones(num_rows, device=logits.device)
    keys = torch.zeros(num_rows, 2, dtype=torch.int64, device=logits.device)
    words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=logits.device)
    apply_token_masks(logits, words[0, :1], words)
    sample_tokens(logits, ones, words[0, :1].expand(num_rows).contiguous(), ones, ones, keys, keys[:, 0])
    gumbel_argmax(logits, keys, keys[:, 0])
