"""Plans what a start launches before the first request, as data: every step, and when.

`compile` comes first: its steps are launched but not run, so that their kernels are compiled side by side. `largest`
is run to see how much memory a step takes. `run` and `prompts` are run once the KV cache and the graphs are there, so
that the first request finds all made that it needs. All steps are the same in every stage of a pipeline, whatever its
layers are, as each step is sent from one stage to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.config.engine import EngineConfig

# Kernels are chosen by powers of two, those of packed weights up to a few hundred tokens by multiples of 64; past that
# by nothing any more that the largest step has not, too.
DECODES = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILLS = (16, 32, *range(64, 513, 64), 1024)
PICTURES = (1024, 576, 256, 64)  # tokens of square pictures whose encoding is recorded, the largest first
MIXED_PREFILL = 128  # tokens of the request that comes beside decodes
# Kernels of experts are chosen by how many tokens an expert has: these meet all of the families' (a test holds it).
EXPERT_PREFILLS = (10, 72, 96, 144, 256, 320, 512, 2048, 4096, 8192)


@dataclass(slots=True, frozen=True)
class DummyStep:
    """A forward pass of requests with `counts[i]` tokens after `context` tokens each."""

    counts: tuple[int, ...]
    context: int = 0
    cascade: bool = True  # decodes share prefixes if they may at all


@dataclass(slots=True, frozen=True)
class WarmupPlan:
    """The steps of one start."""

    compile: tuple[DummyStep, ...] = ()  # on a GPU only; the decode step over static tensors comes before them
    largest: DummyStep | None = None  # None: the prompts are the largest step there can be
    run: tuple[DummyStep, ...] = ()
    prompts: tuple[int, ...] = ()  # lengths of requests that go all the way, from entering a row to leaving it
    measured_blocks: int = 1  # KV blocks that `compile` and `largest` need


def generation_plan(
    config: EngineConfig,
    max_model_len: int,
    *,
    on_gpu: bool,
    compiles: bool,
    short_query: int = 0,
    has_experts: bool = False,
) -> WarmupPlan:
    """The plan of a generating model. `compiles`: its attention is all kernels, which can be compiled without a run;
    `short_query`: see AttentionLayer."""
    room = min(max_model_len, config.block_size, config.max_num_batched_tokens)
    return WarmupPlan(
        compile=compiled_steps(
            config, max_model_len, compiles=compiles, has_experts=has_experts, short_query=short_query
        )
        if on_gpu
        else (),
        largest=_largest_step(config, max_model_len, short_query),
        run=_run_steps(config, max_model_len, on_gpu=on_gpu),
        prompts=(2,) if room >= 4 else (),
    )


def pooling_plan(config: EngineConfig, max_model_len: int, budget: int, *, on_gpu: bool) -> WarmupPlan:
    """The plan of a pooling model with `budget` tokens a step: the largest possible step on a GPU, else a small one."""
    blocks = -(-budget // config.block_size) + config.max_num_seqs
    if not on_gpu:
        return WarmupPlan(prompts=(min(16, max_model_len),), measured_blocks=blocks)
    full, rest = divmod(budget, max_model_len)
    prompts = ((max_model_len,) * full + (rest,) * (rest > 0))[: config.max_num_seqs]
    return WarmupPlan(prompts=prompts, measured_blocks=blocks)


def compiled_steps(
    config: EngineConfig, max_model_len: int, *, compiles: bool, has_experts: bool = False, short_query: int = 0
) -> tuple[DummyStep, ...]:
    """Steps that have all kernels of ordinary ones between them. Where requests that bring few tokens (`short_query`)
    go one way with decodes, kernels are chosen by how many there are of both together."""
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    longest = min(config.max_num_batched_tokens, max_model_len)
    decodes = sorted({min(count, most) for count in (*DECODES, most)})
    lengths = (*PREFILLS, *(EXPERT_PREFILLS if has_experts else ()))
    prefills = sorted({min(length, longest) for length in lengths} - {1})
    shared = [count for count in decodes if count > 1 and config.cascade_attention != "off"]
    if not compiles:  # but really computes
        return tuple(DummyStep((count,), 0, False) for count in (*decodes[:1], *prefills))
    steps = [DummyStep((1,) * count, max_model_len - 1, False) for count in decodes]
    steps += [DummyStep((1,) * count, max_model_len - 1, True) for count in shared]
    steps += [DummyStep((1,) * count, 0, False) for count in decodes[:2]]
    steps += [DummyStep((length,), 0, False) for length in prefills]
    short = min(short_query, MIXED_PREFILL, longest)
    room = min(most - 1, config.max_num_batched_tokens - short) if short > 1 else 0
    return (*steps, *(DummyStep((1,) * count + (short,), 0, False) for count in decodes if count <= room))


def _largest_step(config: EngineConfig, max_model_len: int, short_query: int) -> DummyStep:
    """A step of as many tokens as any can have, in as many requests: of these, as many as can be are short."""
    tokens = config.max_num_batched_tokens
    requests = max(1, min(config.max_num_seqs, tokens))
    short = min(short_query, tokens // requests)
    num_long = next((n for n in range(1, requests) if n * max_model_len >= tokens - (requests - n) * short), requests)
    num_long = num_long if short else requests
    parts = np.array_split(np.arange(tokens - (requests - num_long) * short), num_long)
    return DummyStep((short,) * (requests - num_long) + tuple(min(len(part), max_model_len) for part in parts))


def _run_steps(config: EngineConfig, max_model_len: int, *, on_gpu: bool) -> tuple[DummyStep, ...]:
    """A decode and a prefill, short and (where kernels are compiled) long."""
    length = min(config.max_num_batched_tokens, max_model_len, 64)
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    batch = min(most, 4)
    steps = [DummyStep((1,)), DummyStep((1,) * batch), DummyStep((length,))]
    if on_gpu:
        steps += [DummyStep((1,), max_model_len - 1), DummyStep((1,) * batch, max_model_len - 1)]
        shared = config.cascade_attention != "off"
        steps += [DummyStep((1,) * min(most, 64), max_model_len - 1)] if shared else []
    return tuple(steps)
