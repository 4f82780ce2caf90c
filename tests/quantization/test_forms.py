"""What each form keeps of a weight in the types that models compute in, against the numbers that the checkpoint stands
for."""

from __future__ import annotations

import gguf
import pytest
import torch

from app.checkpoints.gguf.blocks import BLOCK_TYPES, PLAIN
from app.checkpoints.tensors.leaf import Share
from app.quantization import select_quantization
from app.quantization.base import QuantMethod, StoredModule, WeightShares
from app.quantization.forms import WeightForm
from app.quantization.gguf import GgufBlocks
from app.quantization.stored_fp4 import StoredFp4
from tests.gguf_models import random_blocks
from tests.quantization.checkpoints import Shown
from tests.quantization.stored_forms import FORMS

N, K = 64, 256
NAME = "model.layers.0.mlp.down_proj"
# A type's rounding, twice: of a scale or a table's entry, and of an offset that is as large as the group's numbers.
STEPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BLOCKS = [name for name in BLOCK_TYPES if name not in PLAIN]


def unpacked(method: QuantMethod, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> WeightForm:
    leaves = {leaf.name: (leaf, tensors[leaf.name]) for leaf in method.leaves(dtype)}
    shapes = {name: [_size(dim) for dim in leaf.dims] for name, (leaf, _) in leaves.items()}
    stored = {name: x.reshape(shapes[name]) for name, (_, x) in leaves.items()}
    stored = {name: x.to(leaves[name][0].dtype) if x.is_floating_point() else x for name, x in stored.items()}
    return method.unpack(stored, WeightShares((Share(0, N, 0, N),), Share(0, K, 0, K)))


def _size(dim: object) -> int:
    sizes = {"output": N, "input": K, "part": 1}
    return dim.entries if dim.axis == "unit" else dim.count(sizes[dim.axis])  # type: ignore[attr-defined, no-any-return]


def check(form: WeightForm, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Each number within a rounding or two of the largest of its row's run of 32, and on average within one of its
    own."""
    packed = form.pack()
    kept = form.dequantize() if packed is None else packed.dequantize()  # type: ignore[attr-defined]
    largest = exact.unflatten(1, (-1, 32)).abs().amax(2).repeat_interleave(32, 1)
    assert (((kept - exact).abs() / largest.clamp(min=1e-30)).max() / STEPS[dtype]) < 2.0
    assert (kept - exact).norm() / exact.norm() < STEPS[dtype] * 0.75


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_in_16_bits(name: str, dtype: torch.dtype) -> None:
    pack, scheme = FORMS[name].pack()
    packed = pack(NAME, torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.02)
    assert packed is not None
    tensors, exact = packed
    method, _ = select_quantization(None, scheme, torch.device("cpu"), dtype)
    shown = {leaf: Shown(tensor) for leaf, tensor in tensors.items()}
    own = method.method_of(StoredModule(NAME, "linear", dtype, N, K, tensors=shown))
    assert own is not None
    check(unpacked(own, dict(tensors), dtype), exact.float(), dtype)


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_type_of_a_gguf_file_in_16_bits(name: str, dtype: torch.dtype) -> None:
    raw, block = random_blocks(name, (N, K)), BLOCK_TYPES[name]
    exact = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[name]))
    stored = torch.from_numpy(raw).view(N, K // block.size, block.num_bytes)
    check(unpacked(GgufBlocks(dtype, name), {"weight": stored}, dtype), exact, dtype)


def test_scales_too_small_for_16_bits_are_kept() -> None:
    """NVFP4 of a small tensor in fp16: none of its weights may become 0 that fp16 could hold."""
    codes, scale = torch.full((N, K // 2), 0x77, dtype=torch.uint8), torch.full((N, K // 16), 0.0625)
    tensors = {"w": codes, "weight_scale": scale.to(torch.float8_e4m3fn), "s": torch.tensor(1e-6)}
    form = unpacked(StoredFp4(torch.float16, 16, "s", codes="w"), tensors, torch.float16)
    check(form, torch.full((N, K), 6 * 0.0625e-6), torch.float16)
