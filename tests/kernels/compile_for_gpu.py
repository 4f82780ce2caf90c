"""Compile the Triton kernels for a GPU on a machine without one, with the arguments that models call them with.

    env -u TRITON_INTERPRET python -m tests.kernels.compile_for_gpu [h200 | gfx942] [how many, a seed]

gfx942 is AMD's MI300, for which nothing of files for Hopper is compiled. All kernels, or some that the seed draws.

The interpreter accepts programs that the compiler refuses (types, shapes, bf16). Launches are caught before the driver
and compiled ahead of time instead, down to the GPU's binary; for an H200 as launches that may come early
(app/kernels/launch.py). Prints shared memory, registers and spilled bytes of each kernel, and of an early one that it
waits before it touches global memory. Exits 1 if a kernel does not compile, has an option that the GPU's compiler does
not know, does not wait in time, lets memory go that it may still read, or asks for more shared memory than there is.

What one version of Triton compiles another may refuse: run it with both ends of the range that pyproject.toml allows.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction
from triton.tools import tensor_descriptor

from app.kernels import launch
from app.kernels.attention import (
    KV_FP8,
    AttentionMetadata,
    AttentionOptions,
    EncodedStep,
    HeadBias,
    HeadNorm,
    gluon_prefill,
    gluon_texts,
    triton_encoder,
    triton_fixed,
    triton_prefill,
    triton_tile_fp8,
)
from app.kernels.attention.encoder import Sight
from app.kernels.attention.triton_encoded import encoded_kernel_for
from app.kernels.attention.triton_ops import OPS
from app.kernels.attention.triton_prefill import PrefillTile
from app.kernels.attention.triton_rotated import rotated_decode, rotated_scratch, serves_rotated
from app.kernels.attention.triton_shared_splits import share_splits
from app.kernels.drafts import LogitsPlaces, triton_ngram
from app.kernels.drafts import triton_ops as draft_ops
from app.kernels.fused import GatedActivation, LatentRotation, RankBoxes, triton_ops, triton_ranks
from app.kernels.gemm import (
    DeferredNorm,
    NumberKind,
    plain,
    triton_dequantize,
    triton_forms,
    triton_packed_ops,
    triton_quantize,
    triton_small,
    triton_small_sum,
    wide,
)
from app.kernels.gemm import triton_fixed as fixed_products
from app.kernels.gemm.fp8_block import Fp8BlockWeight, Fp8OnlyWeight
from app.kernels.gemm.gluon_int8 import wide_int8_product
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.lookup import TableWeight
from app.kernels.gemm.stored import Form, StoredTiles, bits_of, block_for
from app.kernels.gemm.triton_int8 import Int8Tile, int8_product
from app.kernels.lora import TILE_RANK, AdaptedWeight, SlotMatrices, SlotRows
from app.kernels.lora import triton_ops as lora_ops
from app.kernels.mla import triton_heads
from app.kernels.mla import triton_ops as mla_ops
from app.kernels.moe import GLU, ExpertWeights, Routing, RoutingRule, triton_gate
from app.kernels.moe import tiles as expert_tiles
from app.kernels.moe import triton_ops as expert_ops
from app.kernels.moe.stacked import StackedExperts
from app.kernels.recurrent import DeltaGates, DeltaHeads, GatedNorm, ScanInputs, SpaceInputs, StateStep
from app.kernels.recurrent import triton_ops as recurrent_ops
from app.kernels.rows import RowColumns, StepTensors
from app.kernels.rows import triton_ops as row_ops
from app.kernels.sampling import triton_log_softmax, triton_sample, triton_token_masks
from app.kernels.sampling import triton_ops as sampling_ops
from app.kernels.whole_step import StepExperts, StepLayer, StepShape, StepToken, StepWeight, persistent
from app.kernels.whole_step.forms import BF16, FP8, FP8_BLOCKS, INT8, StepForm, form_of
from tests.kernels.compiled_code import LET_STAGES_GO, Launch, fault_of, fault_of_stages
from tests.kernels.stub_gpu import as_on
from tests.kernels.whole_step.test_gluon_nibbles import layers_of as layers_of_nibbles

IS_AMD = "gfx942" in sys.argv[1:]
TARGET = GPUTarget("hip", "gfx942", 64) if IS_AMD else GPUTarget("cuda", 90, 32)
KNOWN = vars(make_backend(TARGET).parse_options({})).keys()
OPTIONS = {"num_warps", "num_stages", "maxnreg", "launch_pdl", "launch_cooperative_grid", "enable_fp_fusion"}
EARLY_LAUNCH = {"EARLY": True, "launch_pdl": True}
SHARED_BYTES = 65_536 if IS_AMD else 232_448  # a program's at most
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8", torch.bool: "i1", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
ALIGNED = [["tt.divisibility", 16]]
kernels: dict[tuple[Any, ...], tuple[ASTSource, dict[str, Any], bool | None]] = {}


def compile_instead(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **keywords: Any) -> None:
    """Stands in for JITFunction.run."""
    options = {name: value for name, value in keywords.items() if name in OPTIONS}
    values = dict(zip((p.name for p in kernel.params), arguments, strict=False)) | keywords
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        kind, aligned = type_of(value, parameter.is_constexpr, parameter.do_not_specialize)
        aligned = aligned and not parameter.do_not_specialize_on_alignment
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        if aligned:
            attributes[(index,)] = ALIGNED
    key = (kernel.__name__, *signature.items(), *map(str, constants.items()), *options.items())
    if key not in kernels:
        source = GluonASTSource if kernel.is_gluon() else ASTSource
        kernels[key] = source(kernel, signature, constants, attributes), options, values.get("EARLY")


def type_of(value: Any, is_constexpr: bool, do_not_specialize: bool) -> tuple[str, bool]:
    """(the type as the compiler writes it, whether it is known to be a multiple of 16)."""
    is_one = isinstance(value, int) and value == 1 and not do_not_specialize
    if is_constexpr or value is None or is_one:
        return "constexpr", False
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>", False
    if isinstance(value, tensor_descriptor.TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>", False
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}", True
    if isinstance(value, int):
        return "i32" if abs(value) < 1 << 31 else "i64", value % 16 == 0 and not do_not_specialize
    assert isinstance(value, float), value
    return "fp32", False


def compiled(source: ASTSource, options: dict[str, Any], is_early: bool | None) -> str:
    """Shared memory, registers and stack, or what is wrong. is_early: the kernel's EARLY; None: it has none."""
    if unknown := options.keys() - KNOWN:
        return f"FAILED launched with {sorted(unknown)}, which this GPU's compiler does not know"
    try:
        kernel = triton.compile(source, target=TARGET, options=options)
    except Exception as error:
        return f"FAILED {type(error).__name__}: {error}"
    if kernel.metadata.shared > SHARED_BYTES:
        return f"FAILED {kernel.metadata.shared} bytes of shared memory"
    if IS_AMD:
        registers = re.findall(r"\.(?:vgpr|sgpr|vgpr_spill)_count:\s+\d+", kernel.asm["amdgcn"])
        return f"shared {kernel.metadata.shared}, {' '.join(registers)}, {len(kernel.asm['hsaco'])} bytes"
    launch = called(source, options, is_early)
    if fault := fault_of(launch, kernel.asm["ptx"]):
        return f"FAILED {fault}"
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
        if launch.kernel in LET_STAGES_GO:
            sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=False).stdout
            if fault := fault_of_stages(launch, sass):
                return f"FAILED {fault}"
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    waits = ", waits first" if is_early else ""
    return f"shared {kernel.metadata.shared}, {found.group(0) if found else 'usage unknown'}{waits}"


def called(source: ASTSource, options: dict[str, Any], is_early: bool | None) -> Launch:
    """What the checks of its code ask of a launch."""
    names = [parameter.name for parameter in source.fn.params]
    constants = {names[i]: value for (i,), value in source.constants.items()}
    given = {name for name in names if source.signature.get(name, "constexpr") != "constexpr"}
    return Launch(source.fn.__name__, constants, given, is_early, comes_early=bool(options.get("launch_pdl")))


def stand_in(name: str, answer: Any) -> None:
    """What the target's GPU would answer, for a CPU's tensors too: in every module that has imported the function."""
    function = getattr(launch, name)
    for module in list(sys.modules.values()):
        if getattr(module, name, None) is function:
            setattr(module, name, lambda asked: answer)


def linear(hidden: int, attended: int, projected: int, intermediate: int) -> None:
    """A layer's products of few rows, as `linear_add_norm` chains them; gate and up of normal rows, biases, a head."""
    for rows in (1, 32, 64):
        for out, size in ((hidden, attended), (hidden, intermediate)):
            x, weight = zeros(rows, size), zeros(out, size)
            deferred, total = triton_small.linear_add_norm(x, weight, None, zeros(rows, out), weight[:, 0], 1e-6, True)
            triton_small.linear_add_norm(x, weight, weight[0, :1].expand(out), total, weight[:, 0], 1e-6, False)
            assert isinstance(deferred, DeferredNorm)
        triton_small.linear(deferred, zeros(projected, hidden), None)
        triton_small.linear(deferred, zeros(1, hidden), None)  # the gate of a shared expert
        triton_small.linear(deferred, zeros(projected, hidden), zeros(projected))
        triton_small.gated_linear(deferred, zeros(2 * intermediate, hidden), None, "silu")
        triton_small.gated_linear(total, zeros(2 * intermediate, hidden), None, "silu")
        triton_small.activated_linear(deferred, zeros(intermediate, hidden), None, "relu2")
        triton_small.linear(total, zeros(151_936, hidden), None)
    triton_small.gated_linear(zeros(128, hidden), zeros(2 * intermediate, hidden), None, "silu")
    triton_small.activated_linear(zeros(128, hidden), zeros(intermediate, hidden), None, "relu2")


def early_linear(hidden: int, attended: int, projected: int, intermediate: int) -> None:
    """The same of large weights, whose first blocks come before their rows, of all heights."""
    with mock.patch.object(plain, "multiprocessors", return_value=132):
        for rows in (1, 9, 32):
            x, norm = zeros(rows, attended), zeros(hidden)
            normed, total = plain.linear_add_norm(
                x, zeros(hidden, attended), None, zeros(rows, hidden), norm, 1e-6, True
            )
            gated = plain.gated_linear(normed, zeros(2 * intermediate, hidden), None, "silu")
            bias = zeros(hidden)
            normed, _ = plain.linear_add_norm(gated, zeros(hidden, intermediate), bias, total, norm, 1e-6, True)
            plain.linear(normed, zeros(projected, hidden), zeros(projected))


def over_ranks(num_ranks: int, hidden: int, attended: int, intermediate: int) -> None:
    """Sums over the ranks of a host, behind products and in one launch with them."""
    words, address = torch.zeros(2, num_ranks, 100 * hidden, dtype=torch.int64), torch.zeros(num_ranks).long()
    boxes, norm = RankBoxes(0, address, words, torch.zeros(2, dtype=torch.int32)), zeros(hidden)
    for rows in (1, 32, 64):
        total = zeros(rows, hidden)
        for weight in (norm, norm.float()):
            triton_ranks.sum_add_norm(boxes, total, total, weight, 1e-6)
        for size in (attended, intermediate):
            weight = zeros(hidden, size)
            triton_small_sum.linear_sum_norm(boxes, zeros(rows, size), weight, None, total, norm, 1e-6)


def exact(
    sizes: tuple[int, int, int],
    heads: tuple[int, int, int],
    window: int | None,
    soft_cap: float | None = None,
) -> None:
    """A layer of rows that depend on no others, at every number of rows that has a tile of its own; sizes: of the
    hidden state, of gate and up, of the vocabulary."""
    (hidden, intermediate, vocab), (num_heads, num_kv_heads, head_dim) = sizes, heads
    for count in (1, 30, 60, 100, 256, 300, 8192):
        x = torch.empty(count, hidden, dtype=torch.bfloat16)
        ops = fixed_products.OPS
        ops.linear(x, torch.empty(num_heads * head_dim, hidden, dtype=torch.bfloat16), None)
        gated = ops.gated_linear(x, torch.empty(2 * intermediate, hidden, dtype=torch.bfloat16), None, "silu")
        ops.linear_add_norm(gated, torch.empty(hidden, intermediate, dtype=torch.bfloat16), x[0], x, x[0], 1e-6, True)
    triton_ops.OPS.rms_norm(x, x[0], 1e-6)
    triton_log_softmax.log_softmax(torch.empty(2, vocab))
    cache = torch.zeros(64, 2, num_kv_heads, 16, head_dim, dtype=torch.bfloat16)
    for counts in ([1, 1, 30], [1] * 3, [4] * 2, [1] * 300):
        lens, starts = torch.full((len(counts),), 900, dtype=torch.int32), torch.tensor([0, *counts]).cumsum(0).int()
        table, slots = torch.zeros(len(counts), 64, dtype=torch.int32), torch.zeros(sum(counts), dtype=torch.int64)
        meta = AttentionMetadata(starts, lens, table, slots, max(counts), 900, counts.count(1))
        shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        triton_fixed.OPS.prepare(meta, block_size=16, **shape)
        query = zeros(sum(counts), num_heads, head_dim)
        triton_fixed.OPS.paged_attention(query, cache, meta, scale=0.1, sliding_window=window, soft_cap=soft_cap)


def adapted_weight(size: int, parts: tuple[int, ...], max_rank: int, rows: SlotRows) -> AdaptedWeight:
    """One of eight slots."""
    tiles, outputs, first_size = max_rank // TILE_RANK, sum(parts), len(parts) * TILE_RANK * size
    pool = zeros(8, tiles, first_size + outputs * TILE_RANK)
    first = pool[:, :, :first_size].unflatten(2, (len(parts), TILE_RANK, size))
    second = pool[:, :, first_size:].unflatten(2, (outputs, TILE_RANK))
    pieces = lora_ops.part_tiles(parts, torch.device("cpu"))
    matrices = SlotMatrices(first, second, torch.zeros(8, dtype=torch.int32), parts, pieces)
    return AdaptedWeight(triton_small.OPS, zeros(outputs, size), matrices, rows)


def adapted(hidden: int, projected: tuple[int, ...], intermediate: int, max_rank: int) -> None:
    """A layer's products with adapters, in steps of few rows and of many."""
    ops = lora_ops.OPS.linear
    for tokens in (1, 32, 64, 500):
        slots, num_tiles = torch.zeros(tokens, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        rows = lora_ops.OPS.rows_by_slot(slots, num_tiles, max_rank // TILE_RANK)
        over = partial(adapted_weight, max_rank=max_rank, rows=rows)
        x = zeros(tokens, hidden)
        normed, _ = ops.linear_add_norm(x, over(hidden, (hidden,)), None, x, x[0], 1e-6, True)
        ops.linear(normed, over(hidden, projected), None)
        gated = ops.gated_linear(normed, over(hidden, (intermediate, intermediate)), None, "silu")
        ops.linear_add_norm(gated, over(intermediate, (hidden,)), None, x, x[0], 1e-6, True)


def zeros(*shape: int) -> torch.Tensor:
    """In bf16."""
    return torch.zeros(*shape, dtype=torch.bfloat16)


def sampling(dtype: torch.dtype, vocab_size: int) -> None:
    """Sampling of two rows."""
    logits, floats = torch.zeros(2, vocab_size, dtype=dtype), torch.zeros(2)
    keys, ints = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    triton_sample.sample_tokens(logits, floats, ints.int(), floats, floats, keys, ints)
    sampling_ops.gumbel_argmax(logits.float(), keys, ints)
    words = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int32)
    triton_token_masks.apply_token_masks(logits.float(), ints.int(), words)


def rows(max_num_seqs: int, width: int, block_size: int, num_groups: int = 1) -> None:
    """The first kernel of a step."""
    counts, cpu = torch.zeros(max_num_seqs, dtype=torch.int32), torch.device("cpu")
    token_ids = torch.zeros(max_num_seqs * width + 2, dtype=torch.int32, device="meta")
    table = counts.repeat(num_groups)[:, None].expand(-1, -(-width // block_size))
    columns = RowColumns(counts, counts, token_ids, table, width, block_size)
    row_ops.begin_step(counts[:8], counts[:9], columns, StepTensors.zeros(8, 8, cpu, num_groups))


def drafts(width: int, block_size: int, num_groups: int = 1) -> None:
    """The ends of steps with drafts, of two rows."""
    ints, longs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    token_ids, table = torch.zeros(2 * width + 2, dtype=torch.int32, device="meta"), ints[:2, None]
    table = table.repeat(num_groups, -(-width // block_size))
    columns = RowColumns(ints[:2], ints[:2], token_ids, table, width, block_size, longs[:2])
    for places in (None, LogitsPlaces(ints[:2], ints[:2])):
        draft_ops.accept_drafts(columns, ints[:2], places, longs, longs, 8)
    draft_ops.write_drafts(columns, ints[:2], longs.view(2, 2))
    step = StepTensors.zeros(4, 4, torch.device("cpu"), num_groups)
    for sees_block in (False, True):
        draft_ops.place_drafts(columns, longs[:2], step, longs[:2], 1, 2, sees_block=sees_block)
    floats = torch.zeros(2)
    draft_ops.repeat_parameters((floats, ints[:2], floats, floats, longs.view(2, 2)), 3)
    triton_ngram.continue_ngrams(columns, longs[:2], 2, 4, 3)


def fused(dtype: torch.dtype, hidden: int, heads: tuple[int, int, int], use_norm: bool) -> None:
    """The fused functions at the sizes of a model; heads: queries, keys, head size."""
    num_heads, num_kv_heads, head_dim = heads
    x, weight = torch.zeros(4, hidden, dtype=dtype), torch.zeros(max(hidden, head_dim), dtype=dtype)
    triton_ops.add_rms_norm(x, x, weight, 1e-6)
    for keeps_sum, bias in ((True, None), (True, weight), (False, weight)):
        triton_ops.add_layer_norm(x, x, weight, bias, 1e-5, keeps_sum=keeps_sum)
        triton_ops.layer_norm(x, weight, bias, 1e-5)
    triton_ops.add_rms_norm(x, x, weight.float(), 1e-6, weight.float())
    triton_ops.add_rms_norm(x, x, None, 1e-6, weight)
    for activation in get_args(GatedActivation):
        triton_ops.act_and_mul(torch.zeros(4, 8 * hidden, dtype=dtype), activation)
    angles = torch.zeros(4, 1, head_dim, dtype=dtype)
    cache = torch.zeros(2, 2, num_kv_heads, 16, head_dim, dtype=dtype)
    scales = torch.ones(2, num_kv_heads)
    norm = HeadNorm(weight, weight, 1e-6) if use_norm else None
    all_heads = torch.zeros(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    for kv_cache, kv_scales in ((cache, None), (cache.to(KV_FP8), scales)):
        slots = torch.zeros(4, dtype=torch.int64)
        triton_ops.rotate_and_write(all_heads, angles, angles, norm, kv_cache, slots, kv_scales)
        triton_ops.rotate_heads(all_heads, angles, angles, norm, len(all_heads[0]) // 2)


def latent(dtype: torch.dtype, num_heads: int, size: int, dims: tuple[int, int], *, interleaved: bool) -> None:
    """Latents and the rotating part of queries, which lies behind the other part; dims: both parts."""
    weight, angles = torch.zeros(size, dtype=dtype), torch.zeros(4, 1, dims[1], dtype=dtype)
    rotation, slots = LatentRotation(angles, angles, interleaved, weight, 1e-6), torch.zeros(4, dtype=torch.int64)
    query = torch.zeros(4, num_heads, sum(dims), dtype=dtype)[..., dims[0] :]
    row = torch.zeros(4, num_heads * sum(dims) + size + dims[1], dtype=dtype)[:, -size - dims[1] :]
    out = torch.zeros(4, num_heads, size + dims[1], dtype=dtype)[..., size:]
    cache = torch.zeros(2, 16, size + dims[1], dtype=dtype)
    triton_ops.rotate_and_write_latent(query, row, rotation, cache, slots, None, out)
    triton_ops.rotate_and_write_latent(query, row, rotation, cache.to(KV_FP8), slots, torch.ones(1), query)
    up = torch.zeros(num_heads, dims[0] + 128, size, dtype=dtype)
    for num_tokens in (1, 30, 64):
        rows = torch.zeros(num_tokens, num_heads, size, dtype=dtype)
        triton_heads.head_products(rows[..., : dims[0]], up[:, : dims[0]], rows)
        triton_heads.head_products(rows, up[:, dims[0] :].transpose(1, 2), rows[..., :128].contiguous())


def attention(
    dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, kv_dtype: torch.dtype | None = None, **masks: Any
) -> None:
    """A mixed step, steps that may be captured (one that shares splits), prefill by other tiles and kernels."""
    num_heads, num_kv_heads, head_dim = heads
    cache = torch.zeros(64, 2, num_kv_heads, block_size, head_dim, dtype=kv_dtype or dtype)
    scales = torch.ones(2, num_kv_heads) if kv_dtype is not None else None
    for is_static, cascade, counts in (
        (False, False, [1, 1, 30]), (True, False, [1] * 3), (True, True, [1] * 3), (True, True, [1] * 128),
        (True, False, [4] * 3), (True, False, [8] * 3),
    ):  # fmt: skip
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        meta = AttentionMetadata(
            starts, torch.full((len(counts),), 900, dtype=torch.int32),
            torch.zeros(len(counts), 64, dtype=torch.int32), torch.zeros(sum(counts), dtype=torch.int64), max(counts),
            900, len(counts) if is_static else 2, is_static, cascade,
        )  # fmt: skip
        query = torch.zeros(sum(counts), num_heads, head_dim, dtype=dtype)
        shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        OPS.prepare(meta, block_size=block_size, **shape)
        OPS.paged_attention(query, cache, meta, scale=0.1, kv_scales=scales, **masks)
        OPS.write_kv(query[:, :num_kv_heads], query[:, :num_kv_heads], cache, meta.slot_mapping, scales)
        options = AttentionOptions(0.1, **masks)
        lone = replace(meta, is_static=True, is_apart=True, num_decodes=1)
        if serves_rotated(query[:1], cache, lone, options):
            rows, angles = torch.zeros(1, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype), query[:1, :1]
            scratch = rotated_scratch(lone, num_heads, num_kv_heads, head_dim)
            for norm in (None, HeadNorm(query[0, 0], query[0, 0], 1e-6)):
                rotated_decode(rows, angles, angles, norm, cache, lone, scratch, options)
        if IS_AMD or dtype == torch.float32 or is_static or scales is not None or head_dim > 128:  # tiles too large
            continue
        for tile in (PrefillTile(128, 64, 8, 3), PrefillTile(128, 128, 8, 2), PrefillTile(64, 64, 4, 3)):
            triton_prefill.prefill(query, cache, meta, query, options, tile)
        if head_dim in (64, 128) and not masks:
            for window in (None, 128):
                for bias in (None, HeadBias(sinks=torch.zeros(num_heads))):
                    options = AttentionOptions(0.1, window, bias=bias)
                    gluon_prefill.prefill(query, cache, meta, query, options)


def listener(dtype: torch.dtype, heads: int, head_dim: int, intermediate: int) -> None:
    """A decoder's layer of Whisper's, of few streams."""
    hidden, zeros = heads * head_dim, partial(torch.zeros, dtype=dtype)
    for rows in (1, 2, 4, 32):
        x, bias = zeros(rows, hidden), zeros(hidden)
        triton_small.linear(x, zeros(3 * hidden, hidden), zeros(3 * hidden))
        triton_small.linear_add(x, zeros(hidden, hidden), bias, x)
        triton_small.activated_linear(x, zeros(intermediate, hidden), zeros(intermediate), "gelu")
        triton_small.linear_add(zeros(rows, intermediate), zeros(hidden, intermediate), bias, x)
        triton_small.linear(x, zeros(hidden - 1, hidden), None)
        slots = torch.zeros(rows, dtype=torch.int32)
        kernel = encoded_kernel_for(head_dim, 1500)
        assert kernel is not None
        kernel(x.view(rows, heads, head_dim), zeros(94, 2, heads, 16, head_dim), EncodedStep(slots, slots, 1500), 0.1)


def encoder(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    """Attention of encoders, over heads as they lie side by side in a product."""
    num_heads, num_kv_heads, head_dim = heads
    parts = (num_heads, num_kv_heads, num_kv_heads)
    query, key, value = torch.zeros(40, sum(parts), head_dim, dtype=dtype).split(parts, 1)
    tiles, seen = torch.zeros(3, 3, dtype=torch.int32), torch.zeros(40, dtype=torch.bool)
    for window, shown in ((None, None), (65, None), (None, seen)):
        triton_encoder.launch(query, key, value, torch.empty_like(query), tiles, Sight(0.1, window, shown))
    for sight in (Sight(0.1), Sight(0.1, is_causal=True)):
        if not IS_AMD and gluon_texts.serves(query, key, value, sight):
            gluon_texts.launch(query, key, value, torch.empty_like(query), tiles, sight)


def latent_attention(dtype: torch.dtype, num_heads: int, sizes: tuple[int, int, int, int], is_fp8: bool) -> None:
    """Steps that meet latents as they are, of few rows and of many, and one that expands them; sizes: of a latent, a
    rotated key, the rest of a key, a value."""
    size, rope, nope, value = sizes
    cache, scale = torch.zeros(64, 16, size + rope, dtype=KV_FP8 if is_fp8 else dtype), torch.ones(1)
    more = {"scale": 0.1, "kv_scale": scale if is_fp8 else None}
    in_gluon = not IS_AMD and dtype != torch.float32 and sizes == (512, 64, 128, 128)
    for counts in ([1, 1, 1], [1, 30]):
        meta = AttentionMetadata(
            torch.tensor([0, *counts]).cumsum(0).int(), torch.full((len(counts),), 900, dtype=torch.int32),
            torch.zeros(len(counts), 64, dtype=torch.int32), torch.zeros(0), max(counts), 900, 0,
        )  # fmt: skip
        query = torch.zeros(sum(counts), num_heads, size + rope, dtype=dtype)
        for generation in (0, 9 if in_gluon else 0):
            with as_on(generation):
                mla_ops.OPS.prepare(meta, num_heads=num_heads, block_size=16)
                mla_ops.OPS.attend(query, cache, meta, latent_size=size, **more)
    up = torch.zeros(num_heads, nope + value, size, dtype=dtype)
    query, workspace = query[..., : nope + rope], torch.zeros(1000, num_heads, nope + value, dtype=dtype)
    for generation in (0, 9 if in_gluon else 0):
        with as_on(generation):
            mla_ops.OPS.prepare(meta, num_heads=num_heads, block_size=16)
            mla_ops.OPS.attend_expanded(query, cache, meta, up, workspace, value_dim=value, **more)


def state_steps() -> list[StateStep]:
    """A mixed step of 32 tokens, one of one each, one of several each, and one in which some of these stay."""
    steps = []
    for num_short, short_len in ((2, 1), (32, 1), (8, 4)):
        rows = torch.zeros(max(num_short, 3), dtype=torch.int32)
        chunks = torch.zeros(0 if num_short > 2 else 1, 2, dtype=torch.int32)
        of_token = torch.zeros(32, dtype=torch.int32)
        steps.append(StateStep(rows.new_zeros(len(rows) + 1), rows, rows, of_token, num_short, short_len, chunks))
    return [*steps, replace(steps[-1], counts=torch.ones(8, dtype=torch.int32))]


def delta_net(dtype: torch.dtype, heads: DeltaHeads) -> None:
    """A gated delta net and its convolution."""
    x = torch.zeros(32, sum(heads.widths), dtype=dtype)
    ones, gates = torch.zeros(heads.num_values), x[:, : heads.num_values]
    states = torch.zeros(1, heads.num_values, heads.value_dim, heads.key_dim)
    for step in state_steps():
        recurrent_ops.causal_conv(x, torch.zeros(x.shape[1], 4, dtype=dtype), None, x[None, :3], step, activate=True)
        norm = GatedNorm(x[:, : heads.widths[2]], x[0, : heads.value_dim], 1e-6)
        for generation in (0, 0 if IS_AMD else 9):
            with as_on(generation):
                recurrent_ops.gated_delta(x, heads, DeltaGates(gates, gates, ones, ones), norm, states, step)


def state_spaces(dtype: torch.dtype, sizes: tuple[int, int, int, int], channels: int) -> None:
    """Mamba 2 of H heads of P, G groups of N, and Mamba 1 of so many channels."""
    h, p, g, n = sizes
    x, b, numbers = torch.zeros(32, h * p, dtype=dtype), torch.zeros(32, g, n, dtype=dtype), torch.zeros(h)
    inputs = SpaceInputs(x.unflatten(1, (h, p)), b, b, x[:, :h], numbers, numbers, numbers)
    y, of_channel = torch.zeros(32, channels, dtype=dtype), torch.zeros(channels)
    scanned = ScanInputs(y, y[:, :16], y[:, :16], y, torch.zeros(channels, 16), of_channel, of_channel)
    for step in state_steps():
        recurrent_ops.causal_conv(x, x[0, :, None].expand(-1, 3).contiguous(), x[0], x[None, :2], step, activate=False)
        recurrent_ops.state_space(inputs, torch.zeros(1, h, p, n), step)
        recurrent_ops.gated_norm(x.unflatten(1, (g, -1)), GatedNorm(x, x[0], 1e-5, norms_first=False))
        recurrent_ops.selective_scan(scanned, torch.zeros(1, channels, 16), step)


def whole_step(shape: StepShape, form: StepForm = BF16) -> None:
    """A layer of a step of one token, all of it in one memory."""
    s, tile = shape, persistent.tile_of(shape, form)
    assert tile is not None
    attended, projected = s.heads * s.head_dim, (s.heads + 2 * s.kv_heads) * s.head_dim
    count = () if s.experts is None else (s.experts.count,)
    sizes = [(projected, s.hidden), (s.hidden, attended), (*count, 2 * s.intermediate, s.hidden)]
    sizes += [(*count, s.hidden, s.intermediate), (*count, s.hidden)]
    sizes += [(s.hidden,), (s.hidden,), (s.head_dim,), (s.head_dim,), (4, 2, s.kv_heads, 16, s.head_dim)]
    counts = [int(torch.Size(size).numel()) for size in sizes]
    parts = torch.empty(sum(counts), dtype=torch.bfloat16).split(counts)
    found = [x.view(size) for x, size in zip(parts, sizes, strict=True)]
    qkv, out, gate_up, down = (x if form is BF16 else bytes_of(x, form) for x in found[:4])
    router, norm, mlp_norm, *more = found[4:]
    heads = more[:2] if s.norms_heads else (None, None)
    layer = StepLayer(norm, qkv, heads[0], heads[1], out, mlp_norm, gate_up, down, more[2])
    layer = layer if s.experts is None else replace(layer, router=router)
    table = torch.zeros(1, 4, dtype=torch.int32)
    token = StepToken(zeros(s.head_dim), zeros(s.head_dim), torch.zeros(1, dtype=torch.int64), table[0, :1], table)
    step = persistent.PersistentStep(s, {form: tile}, torch.device("cpu"))
    assert step.run(zeros(1, s.hidden), [layer], token) is not None


def bytes_of(weight: torch.Tensor, form: StepForm) -> StepWeight:
    """A weight of 8 bits, or experts', in the first half of the memory of one in bf16."""
    (*count, columns, size), is_blocks = weight.shape, form is FP8_BLOCKS
    words = weight.view(torch.int16).view(-1)[: weight.numel() // 2].view(*count, columns, size // 2)
    scales = torch.zeros(*count, *((size // 128, columns // 128) if is_blocks else (1, columns)))
    kind, group, rows = (
        ("int8", size, 1) if form is INT8 else ("e4m3", 128 if is_blocks else size, 128 if is_blocks else 1)
    )
    tiles = StoredTiles(kind, words, scales, None, None, size, 128, group, rows)
    return StackedExperts(Fp8OnlyWeight(tiles), (*count, columns, size)) if count else tiles


def whole_step_of_nibbles(shape: StepShape, scales: torch.dtype, offsets: torch.dtype | None) -> None:
    """The same with weights of 4 bits."""
    layers = layers_of_nibbles(shape, 1, scales, offsets)
    form = form_of([layers[0].qkv])
    tile = None if form is None else persistent.tile_of(shape, form)
    assert form is not None
    assert tile is not None
    table, angles = torch.zeros(1, 4, dtype=torch.int32), zeros(shape.head_dim)
    token = StepToken(angles, angles, torch.zeros(1, dtype=torch.int64), table[0, :1], table)
    step = persistent.PersistentStep(shape, {form: tile}, torch.device("cpu"))
    assert step.run(zeros(1, shape.hidden), layers, token) is not None


def sharing(num_requests: int) -> None:
    """The search for shared splits among many requests."""
    lens, table = torch.ones(num_requests, dtype=torch.int32), torch.zeros(num_requests, 64, dtype=torch.int32)
    meta = AttentionMetadata(lens, lens, table, lens.long(), 1, 900, num_requests, True, True)
    share_splits(meta, 4, 64, 16, 16, 2)


def found(calls: list[Callable[[], None]]) -> list[tuple[ASTSource, dict[str, Any], bool | None]]:
    """The kernels that the calls launch; or of as many calls as the command line asks for, one of each."""
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    if not numbers:
        for call in calls:
            call()
        return list(kernels.values())
    count, rng, chosen = numbers[0], random.Random(numbers[1]), []
    for call in rng.sample(calls, count):
        kernels.clear()
        call()
        chosen.append(rng.choice(list(kernels.values())))
    return chosen


def compiled_aloud(source: ASTSource, options: dict[str, Any], is_early: bool | None) -> str:
    """As `compiled`, and told."""
    result = compiled(source, options, is_early)
    print(f"{source.fn.__name__:28s} {options} {result}", flush=True)
    return result


def all_calls() -> list[Callable[[], None]]:
    """What models call kernels with."""
    calls: list[Callable[[], None]] = [
        partial(sampling, torch.float32, 151_936),
        partial(sampling, torch.bfloat16, 128_256),
        partial(rows, 256, 12_288, 16),
        partial(rows, 4096, 1 << 20, 16),  # more tokens than int32 counts
        partial(rows, 256, 12_288, 16, num_groups=7),
        partial(drafts, 12_288, 16),
        partial(drafts, 1 << 20, 16, num_groups=7),
    ]
    qwen, llama = (16, 8, 128), (32, 8, 128)
    of_experts = StepExperts(128, 8, weighs_chosen=True, rounds_weights=True)
    for dtype in (torch.bfloat16, torch.float32):
        calls += [
            partial(fused, dtype, 1024, qwen, use_norm=True),
            partial(fused, dtype, 4096, llama, use_norm=False),
            partial(attention, dtype, llama, 16),
            partial(attention, dtype, llama, 16, KV_FP8),
        ]
    calls += [
        partial(listener, torch.bfloat16, 20, 64, 5120),
        partial(listener, torch.float16, 8, 128, 4096),
        partial(encoder, torch.bfloat16, (12, 12, 64)),
        partial(encoder, torch.bfloat16, (16, 8, 128)),
        partial(encoder, torch.float16, (16, 16, 80)),
        partial(encoder, torch.bfloat16, (16, 16, 72)),
        partial(encoder, torch.float32, (12, 12, 64)),
        partial(encoder, torch.bfloat16, (3, 1, 256)),
    ]
    sinks = HeadBias(torch.zeros(32), torch.zeros(32))
    return [
        *calls,
        partial(attention, torch.bfloat16, llama, 16, bias=sinks),
        partial(attention, torch.bfloat16, (32, 32, 64), 16, bias=HeadBias(by_distance=torch.zeros(32, 129))),
        partial(attention, torch.bfloat16, qwen, 64, KV_FP8, sliding_window=512, soft_cap=30.0),
        partial(attention, torch.float16, (14, 2, 64), 16, KV_FP8),
        partial(attention, torch.float16, (7, 1, 80), 32, KV_FP8),
        partial(fused, torch.float16, 112, (7, 1, 80), use_norm=True),
        partial(attention, torch.bfloat16, qwen, 64, sliding_window=512, soft_cap=30.0),
        partial(attention, torch.float16, (14, 2, 64), 16),
        partial(latent, torch.bfloat16, 16, 512, (128, 64), interleaved=True),
        partial(latent, torch.float32, 5, 256, (64, 32), interleaved=False),
        *(
            partial(latent_attention, torch.bfloat16, heads, (512, 64, 128, 128), fp8)
            for heads, fp8 in ((16, False), (16, True), (128, False), (128, True))
        ),
        partial(latent_attention, torch.float32, 5, (256, 32, 64, 64), False),
        partial(latent_attention, torch.bfloat16, 20, (512, 64, 192, 256), False),  # GLM-4.7-Flash
        partial(linear, 1024, 2048, 4096, 3072),
        partial(linear, 4096, 4096, 6144, 14336),
        partial(adapted, 4096, (4096, 1024, 1024), 14336, 16),
        partial(adapted, 1024, (2048, 1024, 1024), 3072, 64),
        partial(attention, torch.bfloat16, (8, 4, 256), 16, soft_cap=50.0),
        partial(attention, torch.bfloat16, (8, 4, 256), 16, KV_FP8, sliding_window=100),
        partial(attention, torch.float16, (7, 1, 80), 32),
        partial(attention, torch.float32, (8, 4, 8), 16),  # heads of fewer columns than a product takes
        *(partial(sharing, num_requests) for num_requests in (256, 512, 4096)),
        partial(delta_net, torch.bfloat16, DeltaHeads(16, 32, 128, 128)),
        partial(delta_net, torch.float32, DeltaHeads(2, 4, 24, 40)),
        partial(delta_net, torch.float32, DeltaHeads(16, 32, 128, 128)),
        partial(state_spaces, torch.bfloat16, (128, 64, 8, 128), 8192),
        partial(state_spaces, torch.float32, (6, 24, 2, 16), 40),
        partial(state_spaces, torch.float32, (128, 64, 8, 128), 8192),
        quantizing,
        partial(packed, "nibble", 4096, 128, is_zero_based=True),
        partial(packed, "nibble", 4096, 32),
        partial(packed, "e2m1", 2048, 16),
        partial(packed, "table", 2048, 64),
        partial(packed, "int8", 4096, 4096),
        partial(packed, "e4m3", 4096, 128, scale_rows=128),
        partial(experts, (128, 768, 2048), RoutingRule(8, renormalize=True), GLU()),
        partial(experts, (32, 2880, 2880), RoutingRule(4, "softmax_of_chosen"), GLU(limit=7.0), has_bias=True),
        partial(experts, (32, 2880, 2880), RoutingRule(4), GLU(limit=7.0), has_bias=True, form=("e2m1", 32, 1)),
        partial(experts, (128, 768, 2048), RoutingRule(8), GLU(), form=("nibble", 128, 1)),
        partial(experts, (128, 768, 2048), RoutingRule(8), GLU(), form=("e4m3", 128, 128)),
        gate_of_shared,
        *([] if IS_AMD else [rounded_experts]),
        *(
            []
            if IS_AMD
            else [partial(early_linear, 2560, 4096, 12_352, 9216), partial(early_linear, 2560, 4800, 16_384, 5760)]
        ),
        *([] if IS_AMD else [partial(over_ranks, 2, 5120, 4096, 12_800), partial(over_ranks, 4, 4096, 1024, 3584)]),
        *(
            []
            if IS_AMD
            else [
                partial(whole_step, StepShape(4096, *llama, 14_336, 1e-5, 0.1, norms_heads=False)),
                partial(whole_step, StepShape(1024, *qwen, 3072, 1e-6, 0.1, norms_heads=True)),
                *(
                    partial(whole_step, StepShape(4096, *llama, 14_336, 1e-5, 0.1, norms_heads=False), form)
                    for form in (INT8, FP8, FP8_BLOCKS)
                ),
                *(
                    partial(
                        whole_step,
                        StepShape(2048, 32, 4, 128, 768, 1e-6, 0.1, norms_heads=True, experts=of_experts),
                        form,
                    )
                    for form in (BF16, FP8_BLOCKS)
                ),
                *(
                    partial(
                        whole_step_of_nibbles, StepShape(4096, *llama, 14_336, 1e-5, 0.1, norms_heads=False), *beside
                    )
                    for beside in ((torch.float16, None), (torch.float16, torch.float32))
                ),
            ]
        ),
        *([] if IS_AMD else [partial(exact, (4096, 14336, 128_256), llama, None)]),
        *([] if IS_AMD else [partial(exact, (1000, 3000, 331), (6, 2, 80), 512, 50.0)]),
    ]


def stored_experts(shape: tuple[int, int, int], form: Form, group: int, scale_rows: int) -> StackedExperts:
    """Experts [E, N, K] of few bits; e2m1 with exponents."""
    (num_experts, columns, size), block = shape, block_for(form, group)
    blocks = -(-size // block)
    words = torch.empty(num_experts, columns, blocks * block * bits_of(form) // 16, dtype=torch.int16)
    groups, kind = (blocks, torch.int32) if form == "e2m1" else (-(-size // group), torch.float32)
    scales = torch.empty(num_experts, groups, columns // scale_rows, dtype=kind)
    return StackedExperts(
        TableWeight(StoredTiles(form, words, scales, None, None, size, block, group, scale_rows)), shape
    )


def experts(
    sizes: tuple[int, int, int],
    rule: RoutingRule,
    activation: GLU,
    *,
    has_bias: bool = False,
    form: tuple[Form, int, int] | None = None,
) -> None:
    """Layers of experts at every number of tokens that has tiles of its own; sizes: E, I, C."""
    num_experts, intermediate, hidden = sizes
    down = torch.empty(num_experts, hidden, intermediate, dtype=torch.bfloat16)  # as its pages are never read
    gate_up = torch.empty(num_experts, 2 * intermediate, hidden, dtype=torch.bfloat16)
    biases = (gate_up[..., 0], down[..., 0]) if has_bias else (None, None)
    weights = ExpertWeights(gate_up, down, activation, *biases)
    if form is not None:
        packed_two = (stored_experts((num_experts, *w.shape[1:]), *form) for w in (gate_up, down))
        weights = ExpertWeights(*packed_two, activation, *biases)
    for count in (1, 32, 128, 512, 2048, 8192) if not IS_AMD else (1, 32):
        x = torch.empty(count, hidden, dtype=torch.bfloat16)
        deferred = DeferredNorm(x, torch.zeros(count, 4), 1e-6)
        routing = triton_gate.gate(x if count > 64 else deferred, gate_up[0, :num_experts], None, rule)
        table = torch.zeros(num_experts, 60, dtype=torch.int32)
        positions, counts = (torch.zeros(n, dtype=torch.int64) for n in (count, num_experts))
        expert_ops.to_slots(routing.ids, table[:, :1].contiguous())
        expert_ops.to_slots(routing.ids, table, positions, counts)
        with as_on(0 if IS_AMD else 8):
            rows = expert_ops.experts(x if count > 64 else deferred, Routing(*routing), weights)
        rows.add_norm(x, x[0], 1e-6, may_defer=True)
        rows.materialize()


def gate_of_shared() -> None:
    """Gates whose last row is that of the shared experts (Qwen3-Next, Qwen 3.5)."""
    rule = RoutingRule(8, renormalize=True, logits_dtype=torch.bfloat16, num_shared=1, gates_shared=True)
    for count in (1, 32, 512, 8192):
        x = torch.empty(count, 2048, dtype=torch.bfloat16)
        triton_gate.gate(x, zeros(257, 2048), None, rule)
        triton_gate.gate(DeferredNorm(x, torch.zeros(count, 4), 1e-6), zeros(257, 2048), None, rule)
        triton_gate.route(torch.zeros(count, 257), rule)


def rounded_experts() -> None:
    """Layers of experts that multiply activations in e4m3."""
    shape, rows = (128, 2048, 768), torch.empty(1024, 2048, dtype=torch.bfloat16)
    stacked = (stored_experts(one, "e4m3", 128, 128) for one in ((128, 1536, 2048), shape))
    packed_two = (replace(one, packed=Fp8BlockWeight(one.packed.stored, rows)) for one in stacked)
    weights = ExpertWeights(*packed_two, GLU())
    routing = Routing(torch.zeros(1024, 8, dtype=torch.int32), torch.zeros(1024, 8))
    biases = rows.new_empty(128, 1536), rows.new_empty(128, 2048)
    biased = replace(weights, activation=GLU(limit=7.0), gate_up_bias=biases[0], down_bias=biases[1], weighs_input=True)
    for tiles in (expert_tiles.FP8, expert_tiles.FP8_ANY):
        for one in (weights, biased):
            expert_ops.experts(rows, routing, one, tiles)


def quantizing() -> None:
    """Activations of products of 8 bits, as a norm's numbers too; and those products of many rows."""
    for kind, by_blocks in (("e4m3", False), ("e4m3", True), ("int8", False)):
        triton_quantize.quantize(zeros(4, 14336), kind, by_blocks=by_blocks)
        x, numbers = zeros(4, 4096), NumberKind(kind, by_blocks)
        triton_quantize.add_norm_quantize(x, x, x[0], 1e-6, numbers)
    quantized = torch.zeros(4, 4096, dtype=torch.int8)
    weight = Int8Weight.of(torch.zeros(64, 4096, dtype=torch.int8), torch.ones(64, 1))
    if not IS_AMD:
        for tile in (Int8Tile(128, 256, 128, 8, 4), Int8Tile(64, 128, 128, 4, 4)):
            int8_product(quantized, torch.zeros(4, 1), weight, None, torch.bfloat16, tile)
        wide_int8_product(quantized, torch.zeros(4, 1), weight, zeros(64), torch.bfloat16)


def packed(form: str, size: int, group: int, *, is_zero_based: bool = False, scale_rows: int = 1) -> None:
    """Products of few rows with weights of a form, as a layer chains them."""
    columns, block = 2048, block_for(form, group)
    words = torch.zeros(columns, size * bits_of(form) // 16, dtype=torch.int16)
    scales = zeros(max(1, size // group), columns // scale_rows)
    table = zeros(16) if form == "table" else None
    offsets = scales if is_zero_based else None
    weight = StoredTiles(form, words, scales, offsets, table, size, block, group, scale_rows)
    for shape in ((16, 8, 8), (32, 4, 2)) if not IS_AMD and bits_of(form) == 4 else ():
        x, streamed = zeros(1, size), triton_packed_ops.StreamedTile(*shape)
        norm = (zeros(columns), 1e-6)
        triton_packed_ops.packed_linear(x, weight, None, streamed, residual=zeros(1, columns), norm=norm)
        deferred = DeferredNorm(x, torch.zeros(1, 64), 1e-6)
        triton_packed_ops.packed_linear(deferred, weight, zeros(columns), streamed, activation="silu")
    for rows in (1, 32, 64, *((256, 512) if form == "nibble" and not is_zero_based else ())):
        x = zeros(rows, size)
        tile = triton_packed_ops.tile_for(rows, weight)
        assert tile is not None
        how = {"residual": zeros(rows, columns), "norm": (zeros(columns), 1e-6)}
        triton_packed_ops.packed_linear(x, weight, None, tile, **how)
        deferred = DeferredNorm(x, torch.zeros(rows, 64), 1e-6)
        triton_packed_ops.packed_linear(deferred, weight, zeros(columns), tile, activation="silu")
        triton_packed_ops.packed_linear(deferred, weight, None, tile, is_beside=True)
    if not IS_AMD and wide.serves(weight):
        for tall in (wide.WideTile(64, 3, 2), wide.WideTile(256, 2)):
            x = zeros(200, size)
            residual, norm = zeros(200, columns), (zeros(columns), 1e-6)
            wide.wide_linear(x, weight, zeros(columns), tall, residual=residual, norm=norm)
            wide.wide_linear(DeferredNorm(x, torch.zeros(200, 64), 1e-6), weight, None, tall, activation="silu")
    triton_dequantize.dequantized(weight, 0, 64, torch.bfloat16)


def main() -> int:
    """Return 1 if a kernel failed."""
    JITFunction.run = compile_instead
    stand_in("shared_memory", SHARED_BYTES)
    if IS_AMD:
        stand_in("register_limit", {})
        torch.version.hip = "7.0"  # who asks is AMD's
        triton_tile_fp8._BY_ASSEMBLY = triton_forms.BY_ASSEMBLY = tl.constexpr(False)
    else:
        stand_in("early_launch", EARLY_LAUNCH)
    results = [compiled_aloud(*kernel) for kernel in found(all_calls())]
    failed = [result for result in results if result.startswith("FAILED")]
    num_early = sum(result.endswith("waits first") for result in results)
    print(f"each must fit {SHARED_BYTES} bytes of shared memory; {num_early} come early, and must wait first")
    print(f"{len(results)} kernels, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
