"""Steps of latent attention for tests: every slot that no request owns, and every padding of a table, is NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from app.kernels.attention import KV_FP8, AttentionMetadata


@dataclass(frozen=True)
class Sizes:
    """Of a model's latent attention."""

    heads: int
    latent: int = 40
    rope: int = 8
    nope: int = 12
    value: int = 20


DEEPSEEK = Sizes(16, 512, 64, 128, 128)
SCALE = 0.17
FP8_SCALE = 0.5


@dataclass
class Step:
    """One step, and what attention over whole heads in float64 makes of it."""

    sizes: Sizes
    query: torch.Tensor  # [T, H, Dn + Dr]
    cache: torch.Tensor  # [B, S, R + Dr]
    meta: AttentionMetadata
    up: torch.Tensor  # [H, Dn + Dv, R]
    truth: torch.Tensor  # fp64 [T, H, Dv]

    @property
    def more(self) -> dict[str, torch.Tensor]:
        """Of a quantized cache."""
        return {} if self.cache.dtype != KV_FP8 else {"kv_scale": torch.tensor([FP8_SCALE], device=self.cache.device)}

    def absorbed(self) -> torch.Tensor:
        """Queries [T, H, R + Dr] as they meet latents."""
        nope = self.sizes.nope
        latent = torch.einsum("thd,hdr->thr", self.query[..., :nope], self.up[:, :nope])
        return torch.cat((latent, self.query[..., nope:]), -1)

    def values(self, found: torch.Tensor) -> torch.Tensor:
        """Absorbed attention [T, H, R] -> [T, H, Dv]."""
        return torch.einsum("thr,hdr->thd", found.double(), self.up[:, self.sizes.nope :].double())

    def alone(self, request: int) -> Step:
        """The step of one request."""
        first, end = self.meta.query_start_loc[request : request + 2].tolist()
        length = int(self.meta.seq_lens[request])
        meta = replace(
            self.meta,
            query_start_loc=torch.tensor([0, end - first], dtype=torch.int32, device=self.query.device),
            seq_lens=self.meta.seq_lens[request : request + 1],
            block_table=self.meta.block_table[request : request + 1],
            max_query_len=end - first,
            max_seq_len=length,
            num_decodes=int(end - first == 1),
            plan=None,
        )
        return replace(self, query=self.query[first:end], meta=meta, truth=self.truth[first:end])


def make_step(
    lens: list[tuple[int, int]],  # (query tokens, length) of each request
    sizes: Sizes,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    is_fp8: bool = False,
    device: str = "cpu",
) -> Step:
    """Blocks in a scrambled order."""
    generator = torch.Generator().manual_seed(len(lens) + sizes.heads)
    counts, lengths = [count for count, _ in lens], [length for _, length in lens]
    blocks_of = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(blocks_of) + 1, generator=generator)
    table = order[:1].expand(len(lens), max(blocks_of) + 2).clone()  # padding: a block of NaN
    cache = torch.full((len(order), block_size, sizes.latent + sizes.rope), torch.nan)
    latents, used = [], 1
    for request, length in enumerate(lengths):
        mine = order[used : used + blocks_of[request]]
        used, table[request, : len(mine)] = used + len(mine), mine
        rows = torch.randn(length, cache.shape[2], generator=generator).to(KV_FP8 if is_fp8 else dtype).float()
        cache[mine.repeat_interleave(block_size)[:length], torch.arange(length) % block_size] = rows
        latents.append(rows.double() * (FP8_SCALE if is_fp8 else 1.0))
    up = (torch.randn(sizes.heads, sizes.nope + sizes.value, sizes.latent, generator=generator) / 6).to(dtype)
    query = torch.randn(sum(counts), sizes.heads, sizes.nope + sizes.rope, generator=generator).to(dtype)
    starts = F.pad(torch.tensor(counts).cumsum(0), (1, 0))
    meta = AttentionMetadata(
        starts.int().to(device), torch.tensor(lengths).int().to(device), table.int().to(device),
        torch.zeros(sum(counts), dtype=torch.int64), max(counts), max(lengths), sum(count == 1 for count in counts),
    )  # fmt: skip
    truth = [
        judged(query[start : start + count], rows, up, sizes)
        for start, count, rows in zip(starts.tolist(), counts, latents, strict=False)
    ]
    cache = cache.to(KV_FP8 if is_fp8 else dtype)
    return Step(sizes, query.to(device), cache.to(device), meta, up.to(device), torch.cat(truth).to(device))


def judged(query: torch.Tensor, latents: torch.Tensor, up: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """PyTorch's own attention over whole heads in float64: query [n, H, Dn + Dr], latents [length, R + Dr]."""
    both = (latents[:, : sizes.latent] @ up.double().flatten(0, 1).t()).unflatten(1, up.shape[:2])
    shared = latents[:, None, sizes.latent :].expand(-1, sizes.heads, -1)
    positions = torch.arange(len(latents))
    mask = positions <= positions[len(latents) - len(query) :][:, None]
    heads = (query.double(), torch.cat((both[..., : sizes.nope], shared), -1), both[..., sizes.nope :])
    return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in heads), attn_mask=mask, scale=SCALE).transpose(
        0, 1
    )
