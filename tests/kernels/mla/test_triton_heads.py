"""Products head by head, plain and in Triton (in its interpreter, or on a real GPU), against float64."""

from __future__ import annotations

import pytest
import torch

from app.kernels.mla import heads, triton_heads

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("products", [heads.head_products, triton_heads.head_products], ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k_last", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "depth", "columns"),
    [(1, 16, 128, 512), (5, 3, 12, 40), (33, 2, 600, 24), (65, 2, 20, 16), (0, 2, 16, 16)],
)
def test_each_head_has_a_matrix_of_its_own(
    products: object, dtype: torch.dtype, k_last: bool, num_tokens: int, num_heads: int, depth: int, columns: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_tokens, num_heads, depth + 8, generator=generator).to(DEVICE, dtype)
    both = torch.randn(num_heads, columns + 4, depth, generator=generator) / depth**0.5
    weight = both[:, 4:] if k_last else both[:, 4:].transpose(1, 2).contiguous().transpose(1, 2)
    weight = weight.to(DEVICE, dtype).transpose(1, 2)  # [H, K, N]
    out = torch.full((num_tokens, num_heads, columns + 16), 7.0, dtype=dtype, device=DEVICE)
    assert callable(products)
    products(rows[..., :depth], weight, out[..., :columns])
    truth = torch.einsum("thk,hkn->thn", rows[..., :depth].double(), weight.double())
    torch.testing.assert_close(out[..., :columns].double(), truth, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert bool((out[..., columns:] == 7).all())
