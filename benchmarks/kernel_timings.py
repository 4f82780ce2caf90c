"""What `python -m benchmarks.kernels` times on a GPU: bf16, Llama-8B's heads, medians.

Every timing is an `Entry`; one that raises is reported and the rest go on. Small kernels are timed inside a CUDA graph,
as a decode step runs them, so that the host's launches do not count.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton.testing
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.kernels.attention import KV_FP8, AttentionMetadata, AttentionOptions, HeadNorm, gluon_prefill, triton_prefill
from app.kernels.attention.triton_ops import OPS
from app.kernels.attention.triton_prefill import PrefillTile
from app.kernels.fused import reference as plain_fused
from app.kernels.fused import triton_ops as fused
from app.kernels.gemm.fp8 import Fp8Weight
from app.kernels.gemm.triton_quantize import quantize
from app.kernels.kernel_table import HOPPER
from app.kernels.sampling import reference, triton_ops, triton_sample
from tests.kernels.attention.cases import Batch

COPY_BYTES_PER_S = 4.3e12
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
HIDDEN, INTERMEDIATE = 4096, 14336
OPTIONS = AttentionOptions(HEAD_DIM**-0.5)
Row = dict[str, Any]
Timing = Callable[[], Row]


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    what: str
    run: Timing


def timings(word: str = "", budget_s: float = float("inf")) -> Iterator[Row]:
    """Rows of all entries whose name holds `word`, while there is time."""
    started = time.perf_counter()
    for entry in entries():
        if word not in entry.what:
            continue
        if time.perf_counter() - started > budget_s:
            yield {"what": entry.what, "skipped": "out of time"}
            continue
        began = time.perf_counter()
        try:
            row = {"what": entry.what, **entry.run()}
        except (
            Exception
        ) as error:  # whatever a compiler, a driver or a library may throw: the others are still worth it
            traceback.print_tb(error.__traceback__, limit=-3)
            row = {"what": entry.what, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        torch.cuda.empty_cache()
        yield {**row, "took_s": round(time.perf_counter() - began, 1)}


def entries() -> list[Entry]:
    """The table, most wanted first."""
    table = prefill_entries(8192, 8192) + prefill_entries(2048, 2048)
    table += sampling_entries()
    table += fused_entries() + fp8_entries()
    table += prefill_entries(2048, 32768)
    for kv_dtype, kind in ((torch.bfloat16, "decode"), (KV_FP8, "decode fp8")):
        for shape in ((1, 32768), (64, 4096), (256, 1024)):
            for block in (16, 64):
                for is_static in (False, True):
                    name = f"{kind} {shape[0]} x {shape[1]}, block {block}{', static' if is_static else ''}"
                    table.append(Entry(name, partial(decode_row, *shape, block, is_static, kv_dtype)))
    for num_query, seq_len in ((8192, 8192), (2048, 32768)):
        name = f"prefill fp8 {num_query} of {seq_len}, block 16, paged"
        table.append(Entry(name, partial(prefill_fp8_row, num_query, seq_len)))
    table += prefill_entries(32768, 32768)
    return table


def prepare(batch: Batch) -> None:
    """Fill the metadata's plan, as a step does before its first layer."""
    _, _, num_kv_heads, block_size, head_dim = batch.kv_cache.shape
    num_heads = batch.query.shape[1]
    OPS.prepare(batch.meta, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)


def large_batch(
    num_requests: int,
    num_query: int,
    seq_len: int,
    block_size: int,
    is_static: bool = False,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    """bf16, the cache of `kv_dtype`; blocks in random order, every request of one length; keys and values are not kept
    contiguous."""
    blocks = seq_len // block_size
    table = torch.randperm(num_requests * blocks, device="cuda").int().view(num_requests, blocks)
    cache = torch.randn(
        num_requests * blocks, 2, NUM_KV_HEADS, block_size, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
    ).to(kv_dtype)
    meta = AttentionMetadata(
        query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32, device="cuda") * num_query,
        seq_lens=torch.full((num_requests,), seq_len, dtype=torch.int32, device="cuda"),
        block_table=table,
        slot_mapping=torch.arange(num_requests * num_query, device="cuda"),
        max_query_len=num_query,
        max_seq_len=seq_len,
        num_decodes=num_requests if num_query == 1 else 0,
        is_static=is_static,
    )
    query = torch.randn(num_requests * num_query, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    batch = Batch(query, cache, meta, [], [])
    prepare(batch)
    return batch


def time_ms(call: Callable[[], object]) -> float:
    """Median of many runs, each with a cold L2 cache."""
    return float(triton.testing.do_bench(call, warmup=5, rep=40, return_mode="median"))


def graph_ms(call: Callable[[], object]) -> float:
    """Mean inside a CUDA graph; the L2 cache stays warm, as between the kernels of a step."""
    call()
    return float(triton.testing.do_bench_cudagraph(call, rep=5))


def scales_for(kv_dtype: torch.dtype) -> torch.Tensor | None:
    """Scales of a quantized cache: powers of 2, so that the same cache can be written in bf16 without loss."""
    return 2.0 ** torch.arange(-8.0, 8.0, device="cuda").view(2, NUM_KV_HEADS) if kv_dtype == KV_FP8 else None


def _fp8_difference(batch: Batch, out: torch.Tensor, scales: torch.Tensor) -> Row:
    """How far `out` is from bf16 kernels over the same numbers in a bf16 cache; an error if they disagree."""
    plain = (batch.kv_cache.float() * scales[:, :, None, None]).to(batch.query.dtype)
    truth = OPS.paged_attention(batch.query, plain, batch.meta, scale=HEAD_DIM**-0.5)
    # Head by head: the scales of the values lie far apart.
    distance = (out.float() - truth.float()).norm(dim=(0, 2)) / truth.float().norm(dim=(0, 2))
    difference = float(distance.max())
    row: Row = {"difference": difference}
    return row if difference < 8e-3 else {**row, "error": "the output differs from that over a bf16 cache"}


def decode_row(
    num_requests: int,
    seq_len: int,
    block_size: int,
    is_static: bool = False,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> Row:
    """bf16 decode: keys and values read once, queries read, output written."""
    batch, scales = large_batch(num_requests, 1, seq_len, block_size, is_static, kv_dtype), scales_for(kv_dtype)
    call = partial(OPS.paged_attention, batch.query, batch.kv_cache, batch.meta, scale=HEAD_DIM**-0.5, kv_scales=scales)
    ms = time_ms(call)
    kv_bytes = seq_len * 2 * NUM_KV_HEADS * HEAD_DIM * batch.kv_cache.itemsize
    rate = num_requests * (kv_bytes + 2 * NUM_HEADS * HEAD_DIM * 2) / ms * 1e3
    row = {"ms": ms, "GB/s": rate / 1e9, "fraction": rate / COPY_BYTES_PER_S}
    return row if scales is None else row | _fp8_difference(batch, call(), scales)


def prefill_fp8_row(num_query: int, seq_len: int) -> Row:
    """The paged kernel over a quantized cache."""
    batch, scales = large_batch(1, num_query, seq_len, 16, kv_dtype=KV_FP8), scales_for(KV_FP8)
    assert scales is not None
    call = partial(OPS.paged_attention, batch.query, batch.kv_cache, batch.meta, scale=HEAD_DIM**-0.5, kv_scales=scales)
    ms = time_ms(call)
    row = {"ms": ms, "TFLOP/s": prefill_flops(num_query, seq_len) / ms / 1e9}
    return row | _fp8_difference(batch, call(), scales)


def prefill_entries(num_query: int, seq_len: int) -> list[Entry]:
    """One request's last num_query of seq_len positions, by every kernel there is."""

    def gluon(batch: Batch, out: torch.Tensor) -> None:
        gluon_prefill.prefill(batch.query, batch.kv_cache, batch.meta, out, OPTIONS)

    def paged(batch: Batch, out: torch.Tensor, sizes: PrefillTile | None = None) -> None:
        triton_prefill.prefill(batch.query, batch.kv_cache, batch.meta, out, OPTIONS, sizes)

    variants: list[tuple[str, int, Callable[[Batch, torch.Tensor], None]]] = [
        ("paged", 16, paged),
        ("paged", 64, paged),
        ("paged 128x64 w8 s3", 16, partial(paged, sizes=PrefillTile(128, 64, 8, 3))),
    ]
    if HOPPER.are_met(torch.device("cuda")):
        variants = [("gluon", 16, gluon), ("gluon", 64, gluon), *variants]
    name = f"prefill {num_query} of {seq_len}"
    table = [
        Entry(f"{name}, block {block}, {what}", partial(prefill_row, num_query, seq_len, block, run))
        for what, block, run in variants
    ]
    if num_query == seq_len:
        table.insert(0, Entry(f"{name}, torch cuDNN, contiguous", partial(sdpa_row, num_query)))
    return table


def prefill_flops(num_query: int, seq_len: int) -> float:
    """Two products of causal attention for the last num_query of seq_len positions."""
    return 4.0 * NUM_HEADS * HEAD_DIM * (num_query * (seq_len - num_query) + num_query * num_query / 2)


def prefill_row(num_query: int, seq_len: int, block_size: int, run: Callable[[Batch, torch.Tensor], None]) -> Row:
    """Time and TFLOP/s, and how far the output is from the paged kernel's, whose checks are the tests."""
    batch = large_batch(1, num_query, seq_len, block_size)
    out, truth = torch.full_like(batch.query, float("nan")), torch.empty_like(batch.query)
    triton_prefill.prefill(batch.query, batch.kv_cache, batch.meta, truth, OPTIONS)
    run(batch, out)
    difference = float((out.float() - truth.float()).norm() / truth.float().norm())
    ms = time_ms(partial(run, batch, out))
    row = {"ms": ms, "TFLOP/s": prefill_flops(num_query, seq_len) / ms / 1e9, "difference": difference}
    return row if difference < 8e-3 else {**row, "error": "the output differs from the paged kernel's"}


def sdpa_row(num_query: int) -> Row:
    """torch's attention on contiguous tensors with every query head's own keys: what a paged kernel has to beat."""
    query, key, value = torch.randn(3, 1, NUM_HEADS, num_query, HEAD_DIM, dtype=torch.bfloat16, device="cuda").unbind()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        ms = time_ms(partial(F.scaled_dot_product_attention, query, key, value, is_causal=True))
    return {"ms": ms, "TFLOP/s": prefill_flops(num_query, num_query) / ms / 1e9}


def sampling_entries() -> list[Entry]:
    """Rows that all ask for the same, from peaked logits (as of a trained model) and flat ones."""
    asked: dict[str, tuple[float, int, float, float]] = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (0.8, 0, 1.0, 0.0),
        "top_k 50": (0.8, 50, 1.0, 0.0),
        "top_p 0.9": (0.8, 0, 0.9, 0.0),
        "top_k 50, top_p 0.9, min_p 0.01": (0.8, 50, 0.9, 0.01),
    }
    table = []
    for num_rows in (256, 64, 1):
        for name, parameters in asked.items():
            for spread in (4.0, 0.5) if "top" in name else (4.0,):
                what = f"sample_tokens {num_rows} x 151936, {name}, spread {spread}"
                table.append(Entry(what, partial(sampling_row, num_rows, 151936, spread, parameters)))
    table.append(Entry("gumbel_argmax 256 x 151936", partial(gumbel_row, 256, 151936)))
    table.append(Entry("torch sort, top_p 0.9, 64 x 151936", partial(sorted_row, 64, 151936)))
    return table


def _sampling_arguments(
    num_rows: int, vocab_size: int, spread: float, parameters: tuple[float, int, float, float]
) -> tuple[torch.Tensor, ...]:
    temperature, top_k, top_p, min_p = parameters
    full = partial(torch.full, (num_rows,), device="cuda")
    keys = torch.randint(0, 2**62, (num_rows, 2), device="cuda")
    return (
        torch.randn(num_rows, vocab_size, device="cuda") * spread,
        full(temperature), full(top_k, dtype=torch.int32), full(top_p), full(min_p),
        keys, torch.arange(num_rows, device="cuda"),
    )  # fmt: skip


def sampling_row(num_rows: int, vocab_size: int, spread: float, parameters: tuple[float, int, float, float]) -> Row:
    """In a graph; the fraction is of one read of the fp32 logits. Draws are compared with the sorting reference."""
    arguments = _sampling_arguments(num_rows, vocab_size, spread, parameters)
    same = float((triton_sample.sample_tokens(*arguments)[0] == reference.sample_tokens(*arguments)[0]).float().mean())
    ms = graph_ms(partial(triton_sample.sample_tokens, *arguments))
    rate = arguments[0].numel() * 4 / ms * 1e3
    row = {"us": ms * 1e3, "fraction": rate / COPY_BYTES_PER_S, "as the reference": same}
    return row if same > 0.98 else {**row, "error": "the draws differ from the reference's"}


def gumbel_row(num_rows: int, vocab_size: int) -> Row:
    """The draw alone, without filters."""
    logits, *_, keys, positions = _sampling_arguments(num_rows, vocab_size, 4.0, (1.0, 0, 1.0, 0.0))
    return {"us": 1e3 * graph_ms(partial(triton_ops.gumbel_argmax, logits, keys, positions))}


def sorted_row(num_rows: int, vocab_size: int) -> Row:
    """What the sort-free kernel replaces."""
    arguments = _sampling_arguments(num_rows, vocab_size, 4.0, (1.0, 0, 0.9, 0.0))
    return {"us": 1e3 * time_ms(partial(reference.sample_tokens, *arguments))}


def fused_entries() -> list[Entry]:
    """Each fused kernel at decode and prefill sizes, beside plain PyTorch."""
    table = []
    for num_tokens in (1, 256, 8192):
        for name, timing in (("add_rms_norm", norm_row), ("act_and_mul", act_row)):
            table.append(Entry(f"{name} {num_tokens} tokens", partial(timing, num_tokens)))
        for use_norm in (False, True):
            what = f"rotate_and_write{' with norm' if use_norm else ''} {num_tokens} tokens"
            table.append(Entry(what, partial(rotate_row, num_tokens, use_norm)))
        table.append(Entry(f"rotate_and_write fp8 {num_tokens} tokens", partial(rotate_row, num_tokens, False, KV_FP8)))
    return table


def _compared(call: Callable[[], object], plain: Callable[[], object], num_bytes: float) -> Row:
    ms, plain_ms = graph_ms(call), graph_ms(plain)
    return {"us": ms * 1e3, "GB/s": num_bytes / ms / 1e6, "torch us": plain_ms * 1e3}


def norm_row(num_tokens: int) -> Row:
    """Two tensors read, two written."""
    x, residual = torch.randn(2, num_tokens, HIDDEN, dtype=torch.bfloat16, device="cuda").unbind()
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    arguments = (x, residual, weight, 1e-5)
    calls = partial(fused.add_rms_norm, *arguments), partial(plain_fused.add_rms_norm, *arguments)
    return _compared(*calls, 4 * x.numel() * 2)


def act_row(num_tokens: int) -> Row:
    """Gate and up read, their product written."""
    x = torch.randn(num_tokens, 2 * INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
    return _compared(partial(fused.act_and_mul, x, "silu"), partial(plain_fused.act_and_mul, x, "silu"), 3 * x.numel())


def rotate_row(num_tokens: int, use_norm: bool, kv_dtype: torch.dtype = torch.bfloat16) -> Row:
    """Heads read; queries, keys and values written. PyTorch's twin waits for the host and has no place in a graph."""
    heads = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    cos, sin = torch.randn(2, num_tokens, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda").unbind()
    weight = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    norm = HeadNorm(weight, weight, 1e-6) if use_norm else None
    shape = (num_tokens // 16 + 1, 2, NUM_KV_HEADS, 16, HEAD_DIM)
    cache = torch.zeros(shape, dtype=kv_dtype, device="cuda")
    slots = torch.randperm(num_tokens, device="cuda")
    ms = graph_ms(partial(fused.rotate_and_write, heads, cos, sin, norm, cache, slots, scales_for(kv_dtype)))
    num_bytes = 2 * heads.numel() + num_tokens * HEAD_DIM * (2 * NUM_HEADS + 2 * NUM_KV_HEADS * cache.itemsize)
    return {"us": ms * 1e3, "GB/s": num_bytes / ms / 1e6}


def fp8_entries() -> list[Entry]:
    """The gate-up product of Llama-8B in fp8, quantizing its input, beside bf16."""
    return [Entry(f"fp8 linear {count} x 4096 x 28672", partial(fp8_row, count)) for count in (1, 64, 256, 8192)]


def fp8_row(num_tokens: int) -> Row:
    """TFLOP/s counts the product alone."""
    weight = torch.randn(2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    packed = Fp8Weight.quantize(weight)
    truth = F.linear(x, weight)
    difference = float((packed.linear(x, None).float() - truth.float()).norm() / truth.float().norm())
    ms, plain_ms = graph_ms(lambda: packed.linear(x, None)), graph_ms(lambda: F.linear(x, weight))
    quantize_ms = graph_ms(lambda: quantize(x, "e4m3"))
    flops = 2.0 * num_tokens * weight.numel()
    row = {"us": ms * 1e3, "TFLOP/s": flops / ms / 1e9, "quantizing us": quantize_ms * 1e3, "bf16 us": plain_ms * 1e3}
    return row | {"difference": difference} | ({} if difference < 0.06 else {"error": "far from the bf16 product"})
