# ruff: noqa: E501, D101, D103, RUF021
"""A compact Llama for training and batched greedy evaluation; parameter names are those of Hugging Face's LlamaForCausalLM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention


def rope(length: int, dim: int, theta: float, device: Any) -> tuple[Tensor, Tensor]:
    inv = 1.0 / theta ** (torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    f = torch.outer(torch.arange(length, device=device, dtype=torch.float32), inv)
    f = torch.cat((f, f), -1)
    return f.cos(), f.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class RMSNorm(nn.Module):
    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, d = c["hidden_size"], c["head_dim"]
        self.nh, self.nk, self.d = c["num_attention_heads"], c["num_key_value_heads"], d
        self.q_proj = nn.Linear(h, self.nh * d, bias=False)
        self.k_proj = nn.Linear(h, self.nk * d, bias=False)
        self.v_proj = nn.Linear(h, self.nk * d, bias=False)
        self.o_proj = nn.Linear(self.nh * d, h, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, cache: Any = None, pos: Tensor | None = None
    ) -> Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.nh, self.d).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.nk, self.d).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.nk, self.d).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        if cache is not None:
            ck, cv = cache
            if pos is None:
                ck[:, :, :t], cv[:, :, :t] = k, v
            else:
                idx = torch.arange(b, device=x.device)
                ck[idx, :, pos], cv[idx, :, pos] = k[:, :, 0], v[:, :, 0]
                k, v = ck, cv
        r = self.nh // self.nk
        k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
        if isinstance(mask, BlockMask):
            y = flex_attention(q, k, v, block_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        h, f = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(h, f, bias=False),
            nn.Linear(h, f, bias=False),
            nn.Linear(f, h, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(c["hidden_size"], c["rms_norm_eps"]),
            RMSNorm(c["hidden_size"], c["rms_norm_eps"]),
        )

    def forward(self, x: Tensor, *a: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *a)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class Llama(nn.Module):
    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.config = c
        self.model = Body(c)
        for n, p in self.named_parameters():
            if p.ndim == 2:
                std = (
                    0.02
                    if "embed" in n
                    else p.shape[1] ** -0.5 * (0.3 if n.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
                )
                nn.init.normal_(p, std=std)

    def hidden(
        self, ids: Tensor, cos: Tensor, sin: Tensor, mask: Any, cache: Any = None, pos: Tensor | None = None
    ) -> Tensor:
        x = F.embedding(ids, self.model.embed_tokens.weight)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.bfloat16)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, mask, None if cache is None else cache[i], pos)
        return self.model.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.model.embed_tokens.weight)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        return self.logits(self.hidden(ids, cos, sin, mask))


def document_mask(doc: Tensor, mask_mod: Any, block: int = 128) -> BlockMask:
    """The causal, within-document BlockMask of rows of packed documents; document numbers never fall along a row."""
    b, t = doc.shape
    n = t // block
    d = doc.view(b, n, block)
    lo, hi = d[..., 0], d[..., -1]
    i = torch.arange(n, device=doc.device)
    lower = i[:, None] > i[None, :]
    touch = hi[:, None, :] >= lo[:, :, None]
    full = lower & (lo[:, None, :] == hi[:, :, None])
    part = ((lower & touch) | (i[:, None] == i[None, :])) & ~full

    def pack(m: Tensor) -> tuple[Tensor, Tensor]:
        m = m[:, None].to(torch.int32)
        return m.sum(-1, dtype=torch.int32), torch.argsort(m, dim=-1, descending=True, stable=True).to(torch.int32)

    pn, pi = pack(part)
    fn, fi = pack(full)
    return BlockMask.from_kv_blocks(pn, pi, fn, fi, BLOCK_SIZE=block, mask_mod=mask_mod)


@torch.no_grad()
def generate(model: Llama, prompts: list[list[int]], max_new: int, stop: int, budget: int = 400_000) -> list[list[int]]:
    """Greedy answers for prompts of any lengths, in batches of similar length with a padded cache, in the model's own precision."""
    c, dev = model.config, model.model.embed_tokens.weight.device
    dt = model.model.embed_tokens.weight.dtype
    out: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    while order:
        take: list[int] = []
        while order and (len(take) + 1) * (len(prompts[order[0]]) + max_new) <= budget or not take:
            take.append(order.pop(0))
        lens = torch.tensor([len(prompts[i]) for i in take], device=dev)
        t = int(lens.max())
        total = t + max_new
        ids = torch.zeros(len(take), t, dtype=torch.long)
        for r, i in enumerate(take):
            ids[r, : len(prompts[i])] = torch.tensor(prompts[i])
        ids = ids.to(dev)
        cos, sin = rope(total, c["head_dim"], c["rope_theta"], dev)
        cache = [
            tuple(
                torch.zeros(len(take), c["num_key_value_heads"], total, c["head_dim"], device=dev, dtype=dt)
                for _ in range(2)
            )
            for _ in range(c["num_hidden_layers"])
        ]
        x = model.hidden(ids, cos[:t], sin[:t], None, cache)
        nxt = model.logits(x[torch.arange(len(take), device=dev), lens - 1]).argmax(-1)
        done = torch.zeros(len(take), dtype=torch.bool, device=dev)
        toks, pos = [], lens.clone()
        span = torch.arange(total, device=dev)
        for step in range(max_new):
            done |= nxt == stop
            toks.append(torch.where(done, -1, nxt))
            if step % 8 == 7 and bool(done.all()):
                break
            if step == max_new - 1:
                break
            mask = (span[None] <= pos[:, None])[:, None, None]
            x = model.hidden(nxt[:, None], cos[pos][:, None, None], sin[pos][:, None, None], mask, cache, pos)
            nxt = model.logits(x[:, 0]).argmax(-1)
            pos = (pos + 1).clamp(max=total - 1)
        got = torch.stack(toks, 1).cpu().tolist()
        for r, i in enumerate(take):
            out[i] = [v for v in got[r] if v >= 0]
    return out
