"""Which kernel is chosen for a call: a table by devices, so that no change of it goes unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app.kernels import fused, gemm, lora, moe, recurrent, rows, sampling
from app.kernels.attention import KV_FP8, AttentionOptions, HeadBias
from app.kernels.attention.triton_decode import DECODES
from app.kernels.attention.triton_ops import PREFILL
from app.kernels.gemm import fp8, fp8_block, int8, tiled
from app.kernels.gemm.fp8_block import Fp8BlockWeight
from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.lookup import TableWeight
from app.kernels.gemm.stored import Form, StoredTiles, bits_of, block_for
from app.kernels.gemm.triton_packed_ops import tile_for
from app.kernels.gemm.triton_quantized import INT8_PRODUCTS
from app.kernels.kernel_table import KernelTable, chosen
from app.kernels.mla.triton_ops import ATTEND, ATTEND_CHUNK
from app.kernels.moe import GLU, ExpertWeights
from app.kernels.moe.stacked import StackedExperts
from app.kernels.moe.tiles import Fp8LayerTiles, tiles_for
from app.kernels.moe.triton_grouped import SCANS, GroupedTile, Product
from tests.kernels.stub_gpu import as_on

META = torch.device("meta")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def name_of(function: Any) -> str:
    """The module of a launch, or of the functions of a device."""
    return str(function.__module__).rpartition(".")[2]


def prefill(dtype: torch.dtype = BF16, head_dim: int = 128, kv: torch.dtype | None = None, **options: Any) -> str:
    query, cache = empty(9, 8, head_dim, dtype=dtype), empty(4, 2, 2, 16, head_dim, dtype=kv or dtype)
    return name_of(chosen(PREFILL.all_on(META), query, cache, AttentionOptions(0.1, **options))[0])


def decodes() -> str:
    """Who is asked first; which calls it takes, its own tests say."""
    return name_of(DECODES.all_on(META)[0].run)


def latent(num_rows: int, dtype: torch.dtype = BF16, kv: torch.dtype | None = None, size: int = 512) -> str:
    cache = empty(4, 16, size + 64, dtype=kv or dtype)
    kernels = ATTEND.all_on(META)
    run = chosen(kernels, dtype, cache, size, num_rows)[0]
    return name_of(next(one.serves for one in kernels if one.run is run))  # several share what launches them


def expanded(dtype: torch.dtype = BF16, nope: int = 128) -> str:
    query, up = empty(9, 16, nope + 64, dtype=dtype), empty(16, nope + 128, 512, dtype=dtype)
    return name_of(chosen(ATTEND_CHUNK.all_on(META), query, up, 128)[0])


def stored(form: Form, columns: int, size: int, group: int = 128, *, offsets: bool = False) -> StoredTiles:
    block = block_for(form, group)
    words = empty(columns, size * bits_of(form) // 16, dtype=torch.int16)
    scales = empty(size // group, columns)
    return StoredTiles(form, words, scales, scales if offsets else None, None, size, block, group)


def packed(num_rows: int, form: Form = "nibble", columns: int = 28672, **more: Any) -> str:
    tile = tile_for(num_rows, stored(form, columns, 4096, **more))
    return type(tile).__name__


def rounded(num_rows: int, *, has_zero: bool = False) -> str:
    zero = empty() if has_zero else None
    weight = Int8Weight(stored("int8", 28672, 4096, 4096), zero, zero, zero)
    if weight.product is int8.plain_linear:
        return "int8"
    return name_of(chosen(INT8_PRODUCTS.all_on(META), num_rows, weight)[0])


def stack(num_experts: int, num_rows: int, size: int, kind: str) -> Any:
    if kind == "plain":
        return empty(num_experts, num_rows, size)
    form: Form = "e4m3" if kind == "fp8" else "nibble"
    words = empty(num_experts, num_rows, size * bits_of(form) // 16, dtype=torch.int16)
    rows_each = 128 if kind == "fp8" else 1
    scales = empty(num_experts, size // 128, num_rows // rows_each)
    tiles = StoredTiles(form, words, scales, None, None, size, 128, 128, rows_each)
    weight = Fp8BlockWeight(tiles, scales) if kind == "fp8" else GroupWeight(tiles)
    return StackedExperts(weight, (num_experts, num_rows, size))


def experts(num_pairs: int, kind: str = "plain", dtype: torch.dtype = BF16, activation: GLU | None = None) -> str:
    """Of 8 experts: how their products run."""
    weights = ExpertWeights(stack(8, 512, 512, kind), stack(8, 512, 256, kind), activation or GLU())
    tiles = tiles_for(empty(num_pairs // 2, 2, dtype=torch.int32), weights, dtype)
    if isinstance(tiles, Fp8LayerTiles):
        return "rounded in Gluon" if tiles.gate_up.in_gluon else "rounded"
    how = "wide" if tiles.gate_up.in_gluon else "sorted" if tiles.is_sorted else "scanned"
    return f"{how} of unpacked" if tiles.unpacks else how


def scan(form: Form = "nibble", dtype: torch.dtype = BF16) -> str:
    tiles = stored(form, 512, 512)
    product = Product(StoredTiles(form, tiles.words[None], tiles.scales[None], None, None, 512, 128, 128), None)
    return str(
        chosen(SCANS.all_on(META), product, GroupedTile(8, 32, 128, 4, 3, ahead=2), empty(4, 512, dtype=dtype))[1]
    )


GENERATIONS = (0, 8, 9, 10)  # AMD's or older, Ampere, Hopper, Blackwell
SINKS, ALIBI = HeadBias(sinks=torch.zeros(8)), HeadBias(slopes=torch.zeros(8))


def on_hopper(hopper: str, others: str) -> tuple[str, ...]:
    return others, others, hopper, others


def anywhere(name: str) -> tuple[str, ...]:
    return (name,) * len(GENERATIONS)


TABLE: list[tuple[Callable[[], str], tuple[str, ...]]] = [
    (prefill, on_hopper("gluon_prefill", "triton_prefill")),
    (lambda: prefill(FP16, 64), on_hopper("gluon_prefill", "triton_prefill")),
    (lambda: prefill(bias=SINKS), on_hopper("gluon_prefill", "triton_prefill")),
    (lambda: prefill(sliding_window=128), on_hopper("gluon_prefill", "triton_prefill")),
    (lambda: prefill(head_dim=64, sliding_window=128), anywhere("triton_prefill")),
    (lambda: prefill(bias=ALIBI), anywhere("triton_prefill")),
    (lambda: prefill(soft_cap=30.0), anywhere("triton_prefill")),
    (lambda: prefill(FP32), anywhere("triton_prefill")),
    (decodes, on_hopper("gluon_decode", "triton_decode")),
    (lambda: prefill(head_dim=256), anywhere("triton_prefill")),
    (lambda: prefill(kv=KV_FP8), anywhere("triton_prefill")),
    (lambda: latent(16), on_hopper("gluon_few_rows", "triton_attend")),
    (lambda: latent(17), on_hopper("gluon_attend", "triton_attend")),
    (lambda: latent(16, kv=KV_FP8), on_hopper("gluon_few_fp8", "triton_attend")),
    (lambda: latent(17, kv=KV_FP8), anywhere("triton_attend")),
    (lambda: latent(16, FP32), anywhere("triton_attend")),
    (lambda: latent(16, size=256), anywhere("triton_attend")),
    (expanded, on_hopper("gluon_expanded", "triton_expanded")),
    (lambda: expanded(FP32), anywhere("triton_expanded")),
    (lambda: expanded(nope=192), anywhere("triton_expanded")),
    (lambda: packed(1), anywhere("PackedTile")),
    (lambda: packed(1, columns=4096), ("PackedTile", *["StreamedTile"] * 3)),
    (lambda: packed(1, offsets=True), ("PackedTile", *["StreamedTile"] * 3)),
    (lambda: packed(1, "e2m1"), anywhere("PackedTile")),
    (lambda: packed(9), anywhere("PackedTile")),
    (lambda: packed(32, offsets=True), on_hopper("WideTile", "PackedTile")),
    (lambda: packed(65), on_hopper("WideTile", "PackedTile")),
    (lambda: packed(65, offsets=True), on_hopper("WideTile", "NoneType")),
    (lambda: packed(512), on_hopper("WideTile", "PackedTile")),
    (lambda: packed(513), anywhere("NoneType")),
    (lambda: packed(64, "int8"), anywhere("PackedTile")),
    (lambda: packed(65, "int8"), anywhere("NoneType")),
    (lambda: packed(8, group=24), anywhere("NoneType")),
    (lambda: rounded(64), ("int8", "int8", "triton_int8", "triton_int8")),
    (lambda: rounded(2048), ("int8", "int8", "gluon_int8", "triton_int8")),
    (lambda: rounded(2048, has_zero=True), ("int8", "int8", "triton_int8", "triton_int8")),
    (lambda: experts(16), anywhere("scanned")),
    (lambda: experts(512), anywhere("scanned")),
    (lambda: experts(514), on_hopper("wide", "sorted")),
    (lambda: experts(514, dtype=FP32), anywhere("sorted")),
    (lambda: experts(514, activation=GLU("gelu")), anywhere("sorted")),
    (lambda: experts(32, "4 bits"), anywhere("scanned")),
    (lambda: experts(2048, "4 bits"), anywhere("sorted")),
    (lambda: experts(2050, "4 bits"), on_hopper("wide of unpacked", "sorted of unpacked")),
    (lambda: experts(254, "fp8"), anywhere("sorted")),
    (lambda: experts(256, "fp8"), on_hopper("rounded in Gluon", "sorted")),
    (lambda: experts(256, "fp8", activation=GLU("gelu")), on_hopper("rounded", "sorted")),
    (lambda: experts(256, "fp8", FP32), anywhere("sorted")),
    (scan, ("0", "2", "2", "2")),
    (lambda: scan("table"), anywhere("0")),
    (lambda: scan(dtype=FP32), anywhere("0")),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(TABLE)))
def test_calls(place: int) -> None:
    choose, expected = TABLE[place]
    found = []
    for generation in GENERATIONS:
        with as_on(generation):
            found.append(choose())
    assert tuple(found) == expected


TABLES: dict[str, tuple[KernelTable[Any], str, str]] = {
    "fused": (fused.FUSED_OPS, "reference", "triton_ops"),
    "linear": (gemm.LINEAR_OPS, "reference", "triton_small"),
    "dequantized": (tiled.DEQUANTIZE, "tiled", "triton_dequantize"),
    "lora": (lora.LORA_OPS, "reference", "triton_sort"),
    "experts": (moe.MOE_OPS, "reference", "triton_gate"),
    "recurrent": (recurrent.RECURRENT_OPS, "torch_ops", "triton_conv"),
    "begin_step": (rows.BEGIN_STEP, "reference", "triton_ops"),
    "gumbel_argmax": (sampling.GUMBEL_ARGMAX, "reference", "triton_ops"),
    "sample_tokens": (sampling.SAMPLE_TOKENS, "reference", "triton_sample"),
    "token_masks": (sampling.TOKEN_MASKS, "token_masks", "triton_token_masks"),
    "fp8": (fp8.FP8_LINEAR, "fp8", "triton_quantized"),
}


ON_HOPPER = {"linear": "plain"}


@pytest.mark.parametrize("name", TABLES)
def test_devices(name: str) -> None:
    """A host's are plain PyTorch, those of all GPUs Triton's."""
    table, plain, on_gpu = TABLES[name]
    assert module_of(table.on(torch.device("cpu"))) == module_of(table.on(META)) == plain
    for generation in GENERATIONS:
        with as_on(generation):
            assert module_of(table.on(META)) == (ON_HOPPER.get(name, on_gpu) if generation == 9 else on_gpu)


def test_exact_kernels_on_a_hopper() -> None:
    exact = {
        "fused": "triton_ops", "linear": "triton_fixed", "gumbel_argmax": "triton_ops",
        "sample_tokens": "triton_sample",
    }  # fmt: skip
    with as_on(9):
        for name, module in exact.items():
            assert module_of(TABLES[name][0].on(META, exact=True)) == module
        assert name_of(moe.MOE_OPS.on(META, exact=True).experts) == "triton_exact"


def module_of(kernels: Any) -> str:
    """That of a function, or of the first of several that belong together; of fused ones, one that is no other's."""
    if callable(kernels):
        return name_of(kernels)
    if isinstance(kernels, fused.FusedOps):
        return name_of(kernels.rotate_and_write)
    return name_of(next(getattr(kernels, name) for name in type(kernels).__dataclass_fields__))


def test_products_of_8_bits_need_tensor_cores_for_them() -> None:
    for generation, of_blocks, of_int8 in ((8, "fp8_block", "int8"), (9, *["triton_quantized"] * 2)):
        with as_on(generation):
            assert name_of(fp8_block.FP8_BLOCK_LINEAR.on(META)) == of_blocks
            assert name_of(int8.INT8_LINEAR.on(META)) == of_int8
    with as_on(9, fp8_products=False):
        assert name_of(fp8_block.FP8_BLOCK_LINEAR.on(META)) == "fp8_block"
        assert name_of(fp8.FP8_LINEAR.on(META)) == "fp8"


def test_packed_weights_have_products_of_their_own_on_a_gpu_alone() -> None:
    for weight in (GroupWeight(stored("nibble", 64, 256)), TableWeight(stored("e2m1", 64, 256))):
        assert weight.ops_on(torch.device("cpu")) is None
        with as_on(8):
            ops = weight.ops_on(META)
            assert ops is not None
            assert module_of(ops) == "triton_packed_ops"


def test_a_library_packs_what_lies_on_the_host() -> None:
    for table in (gemm.GEMM_KERNELS, tiled.TILED_KERNELS):
        assert table.all_on(torch.device("cpu"))
        assert table.all_on(META) == ()
        with as_on(9):
            assert table.all_on(META) == ()
