"""Tiny random drafters in the forms of published checkpoints, and what each would draft, in plain PyTorch.

A reference sees the whole text anew: no cache, no steps, no shares of ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import PreTrainedModel

VOCAB, SIZE, HEADS, KV_HEADS, DIM, INNER, EPS, THETA = 331, 64, 4, 2, 16, 96, 1e-6, 10000.0
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 512,
}
Tensors = dict[str, torch.Tensor]
Drafts = Callable[[list[int], int], list[int]]  # (all tokens so far, how many) -> drafts


def write(folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".pt"):
        torch.save(tensors, folder / file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return folder


def drawn(seed: int, *shape: int, scale: float = 0.2) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def layer_tensors(prefix: str, width: int, seed: int) -> Tensors:
    """A layer of Llama's whose attention reads `width` numbers."""
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, width),
        "self_attn.k_proj": (KV_HEADS * DIM, width),
        "self_attn.v_proj": (KV_HEADS * DIM, width),
        "self_attn.o_proj": (SIZE, HEADS * DIM),
        "mlp.gate_proj": (INNER, SIZE),
        "mlp.up_proj": (INNER, SIZE),
        "mlp.down_proj": (SIZE, INNER),
    }
    made = {f"{prefix}{name}.weight": drawn(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    made[f"{prefix}post_attention_layernorm.weight"] = 1 + drawn(seed + 9, SIZE)
    return made


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def attend(x: torch.Tensor, w: Tensors) -> torch.Tensor:
    """Causal attention of a whole text, x [T, width] -> [T, C]."""
    count = len(x)
    angles = torch.outer(torch.arange(count).float(), THETA ** (-torch.arange(0, DIM, 2).float() / DIM))
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1)[:, None] for f in (torch.cos, torch.sin))

    def heads(name: str, turned: bool) -> torch.Tensor:
        y = F.linear(x, w[f"self_attn.{name}.weight"]).view(count, -1, DIM)
        weight = w.get(f"self_attn.{name[0]}_norm.weight")
        y = y if weight is None else norm(y, weight)
        first, second = y.chunk(2, dim=-1)
        return (y * cos + torch.cat((-second, first), dim=-1) * sin) if turned else y

    q, k, v = heads("q_proj", True), heads("k_proj", True), heads("v_proj", False)
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    scores += torch.full((count, count), float("-inf")).triu(1)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
    return F.linear(out, w["self_attn.o_proj.weight"])


def layer(x: torch.Tensor, residual: torch.Tensor, w: Tensors) -> torch.Tensor:
    residual = residual + attend(x, w)
    normed = norm(residual, w["post_attention_layernorm.weight"])
    gate, up = (F.linear(normed, w[f"mlp.{name}.weight"]) for name in ("gate_proj", "up_proj"))
    return residual + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])


def named(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def hidden_states(target: PreTrainedModel, tokens: list[int]) -> list[torch.Tensor]:
    """What each layer reads, and at last the normed output, of all tokens but the newest."""
    with torch.no_grad():
        found = target(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    return [states[0] for states in found.hidden_states]


def chained(
    tokens: list[int],
    count: int,
    features: torch.Tensor,
    run: Callable[[list[int], torch.Tensor], torch.Tensor],
    tell: Callable[[torch.Tensor], int],
) -> list[int]:
    """Drafts of a drafter that `run` over (the token behind each position, features [T, C]) gives features [T, C]."""
    following, drafts = tokens[1:], []
    for _ in range(count):
        made = run(following, features)
        drafts.append(tell(made[-1]))
        following, features = [*following, drafts[-1]], torch.cat((features, made[-1:]))
    return drafts


def eagle3(folder: Path, target: PreTrainedModel, form: str = "original", reads: list[int] | None = None) -> Drafts:
    """A checkpoint with 97 draft tokens, and its reference; `norms`: with every further norm that there is, Qwen3's of
    queries and keys, too."""
    number, known = target.config.num_hidden_layers, 97
    reads = reads or [2, number // 2, number - 3]
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:known].sort().values
    inner = layer_tensors("midlayer.", 2 * SIZE, 20)
    for seed, name in enumerate(("input_layernorm", "hidden_norm")):
        inner[f"midlayer.{name}.weight"] = 1 + drawn(40 + seed, SIZE)
    w = {
        **inner,
        "fc.weight": drawn(50, SIZE, len(reads) * SIZE),
        "norm.weight": 1 + drawn(51, SIZE),
        "lm_head.weight": drawn(52, known, SIZE),
        "d2t": ids - torch.arange(known),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, value=True),
    }
    has_norms = form == "norms"
    if has_norms:
        w |= {f"midlayer.self_attn.{name}_norm.weight": 1 + drawn(70 + i, DIM) for i, name in enumerate("qk")}
        w |= {f"fc_norm.{i}.weight": 1 + drawn(72 + i, SIZE) for i in range(len(reads))}
        w["input_norm.weight"] = 1 + drawn(80, len(reads) * SIZE)
    stored = dict(w)
    config = {**CONFIG, "draft_vocab_size": known, "eagle_aux_hidden_state_layer_ids": reads}
    if has_norms:
        config |= {"fc_norm": True, "norm_output": True, "eagle_config": {"norm_before_fc": True}}
    embedding = target.get_input_embeddings().weight.detach()
    before = form == "speculators"
    if form == "speculators":
        stored = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in w.items()}
        stored["embed_tokens.weight"] = embedding = drawn(60, VOCAB, SIZE)
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": CONFIG,
            "draft_vocab_size": known,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": reads,
        }
    write(folder, config, stored, "pytorch_model.bin.pt" if form == "bin" else "model.safetensors")
    mid = named(w, "midlayer.")

    def run(following: list[int], features: torch.Tensor) -> torch.Tensor:
        normed = norm(features, mid["hidden_norm.weight"])
        x = torch.cat((norm(embedding[following], mid["input_layernorm.weight"]), normed), dim=-1)
        made = layer(x, normed if before else features, mid)
        return norm(made, w["norm.weight"]) if has_norms else made

    def tell(made: torch.Tensor) -> int:
        return int(ids[(w["lm_head.weight"] @ (made if has_norms else norm(made, w["norm.weight"]))).argmax()])

    def drafts(tokens: list[int], count: int) -> list[int]:
        read = [hidden_states(target, tokens)[i] for i in reads]
        if has_norms:
            read = [norm(one, w[f"fc_norm.{i}.weight"]) for i, one in enumerate(read)]
        joined = torch.cat(read, dim=-1)
        features = F.linear(norm(joined, w["input_norm.weight"]) if has_norms else joined, w["fc.weight"])
        return chained(tokens, count, features, run, tell)

    return drafts


def eagle(folder: Path, target: PreTrainedModel, has_bias: bool = True) -> Drafts:
    """A checkpoint without embedding and head, and its reference."""
    w = {**layer_tensors("layers.0.", SIZE, 20), "fc.weight": drawn(50, SIZE, 2 * SIZE)}
    if has_bias:
        w["fc.bias"] = drawn(51, SIZE)
    write(folder, CONFIG, w)
    own, embedding = named(w, "layers.0."), target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()

    def run(following: list[int], features: torch.Tensor) -> torch.Tensor:
        x = F.linear(torch.cat((embedding[following], features), dim=-1), w["fc.weight"], w.get("fc.bias"))
        return layer(x, x, own)

    def drafts(tokens: list[int], count: int) -> list[int]:
        states = hidden_states(target, tokens)
        return chained(tokens, count, states[-1], run, lambda made: int((head @ made).argmax()))

    return drafts


def medusa(folder: Path, target: PreTrainedModel, form: str = "original") -> Drafts:
    """Five heads of two layers, in the authors' form or in vLLM's, and their reference."""
    heads, layers, known = 5, 2, 97
    inner = {(h, i): drawn(70 + 10 * h + i, SIZE, SIZE) for h in range(heads) for i in range(layers)}
    out = [drawn(80 + h, VOCAB if form == "original" else known, SIZE) for h in range(heads)]
    ids = torch.arange(VOCAB)
    if form == "original":
        stored = {f"{h}.{i}.linear.weight": w for (h, i), w in inner.items()}
        stored |= {f"{h}.{i}.linear.bias": drawn(90 + h, SIZE) for h, i in inner}
        stored |= {f"{h}.{layers}.weight": w for h, w in enumerate(out)}
        write(folder, {"medusa_num_heads": 2, "medusa_num_layers": 1}, stored, "medusa_lm_head.pt")
    else:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:known]
        stored = {f"blocks.{h}.layers.{i}.weight": w for (h, i), w in inner.items()}
        stored |= {f"lm_heads.{h}.weight": w for h, w in enumerate(out)} | {"token_map": ids}
        sizes = {"hidden_size": SIZE, "vocab_size": VOCAB, "truncated_vocab_size": known}
        config = {"model_type": "medusa", **sizes, "num_heads": heads, "num_hidden_layers": layers}
        write(folder, config, stored)

    def drafts(tokens: list[int], count: int) -> list[int]:
        hidden, found = hidden_states(target, tokens)[-1][-1], []
        for h in range(count):
            x = hidden
            for i in range(layers):
                bias = stored.get(f"{h}.{i}.linear.bias")
                x = x + F.silu(F.linear(x, inner[h, i], bias))
            found.append(int(ids[(out[h] @ x).argmax()]))
        return found

    return drafts


def mlp_speculator(folder: Path, target: PreTrainedModel, tied: bool = False) -> Drafts:
    """Four stages, tied or not, and their reference."""
    stages, inner = 4, 48
    w: Tensors = {}
    for i in range(stages):
        own = 0 if tied else i
        w[f"emb.{i}.weight"] = drawn(100 + own, VOCAB, inner)
        w[f"proj.{i}.weight"] = drawn(110 + (min(i, 1) if tied else i), inner, SIZE if i == 0 else inner)
        w[f"head.{i}.weight"] = drawn(120 + own, VOCAB, inner)
        w[f"ln.{i}.weight"], w[f"ln.{i}.bias"] = 1 + drawn(130 + own, inner), drawn(140 + own, inner)
    config = {"model_type": "mlp_speculator", "n_predict": stages, "emb_dim": SIZE, "inner_dim": inner}
    config |= {
        "vocab_size": VOCAB,
        "tie_weights": tied,
        "scale_input": tied,
        "architectures": ["MLPSpeculatorPreTrainedModel"],
    }
    write(folder, config, {f"speculator.{name}": tensor for name, tensor in w.items()})
    state_weight = 0.5 ** (0.5 / stages)
    token_weight = math.sqrt((1 - state_weight**2) * (inner / 2))

    def drafts(tokens: list[int], count: int) -> list[int]:
        state, last, found = hidden_states(target, tokens)[-1][-1], tokens[-1], []
        if tied:
            state = norm(state, torch.ones(())) / 2**0.5
        for i in range(count):
            mixed = w[f"proj.{i}.weight"] @ state + w[f"emb.{i}.weight"][last] * (token_weight / state_weight)
            state = F.gelu(norm(mixed, w[f"ln.{i}.weight"]) + w[f"ln.{i}.bias"])
            last = int((w[f"head.{i}.weight"] @ state).argmax())
            found.append(last)
        return found

    return drafts


def block(folder: Path, target: PreTrainedModel, form: str = "dflash") -> Drafts:
    """Two layers over a block of masks in the form of DFlash's authors (`dflash-windows`: the second sees a few
    positions back; `dflash2`: the first does, and the whole block), of DSpark's, or of "speculators" with fewer tokens,
    and their reference."""
    reads, mask, known, rank, is_spark = [0, 2, 4], 7, VOCAB, 8, form == "dspark"
    is_second, taps, group, best = form == "dflash2", 3, 8, 5
    windows = (10 if is_second else None, 10 if form == "dflash-windows" else None)
    w: Tensors = {"fc.weight": drawn(200, SIZE, len(reads) * SIZE)}
    w |= {f"{name}.weight": 1 + drawn(201, SIZE) for name in ("hidden_norm", "norm")}
    for i in range(2):
        w |= layer_tensors(f"layers.{i}.", SIZE, 210 + 20 * i)
        w[f"layers.{i}.input_layernorm.weight"] = 1 + drawn(250 + i, SIZE)
        w |= {f"layers.{i}.self_attn.{name}_norm.weight": 1 + drawn(252 + i, DIM) for name in ("q", "k")}
    embedding, head = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    config = {**CONFIG, "model_type": "qwen3", "num_hidden_layers": 2}
    stored, ids = dict(w), torch.arange(VOCAB)
    if any(windows):
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        config |= {"layer_types": kinds, "sliding_window": 10}
    if form.startswith("dflash"):
        config |= {"architectures": ["DFlashDraftModel"], "block_size": 8, "num_target_layers": 6}
        config |= {"dflash_config": {"mask_token_id": mask, "target_layer_ids": reads}}
    if is_second:
        config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        config["dflash_config"] |= {"conv_kernel_size": taps, "conv_group_size": group}
        config["dflash_config"] |= {"selector_rank": rank, "selector_top_k": best}
        for i, part in enumerate(f"layers.{i}.{name}_conv" for i in range(2) for name in ("attention", "mlp")):
            w[f"{part}.base_kernel"] = drawn(270 + i, 2, taps, SIZE)
            w[f"{part}.kernel_projection.weight"] = drawn(280 + i, 2 * taps * SIZE // group, SIZE, scale=0.05)
        w["candidate_selector.hidden_projection.weight"] = drawn(290, rank, SIZE)
        for i, name in enumerate(("predecessor", "successor")):
            w[f"candidate_selector.{name}_codebook"] = drawn(291 + i, VOCAB, rank, scale=1.0)
        stored |= w
    elif is_spark:
        config |= {"architectures": ["Qwen3DSparkModel"], "block_size": 5, "mask_token_id": mask, "markov_rank": rank}
        config |= {"target_layer_ids": reads, "markov_head_type": "vanilla", "enable_confidence_head": True}
        embedding, head = drawn(260, VOCAB, SIZE), drawn(261, VOCAB, SIZE)
        w |= {"markov_head.markov_w1.weight": drawn(262, VOCAB, rank, scale=1.0)}
        w |= {"markov_head.markov_w2.weight": drawn(263, VOCAB, rank, scale=1.0)}
        stored = {**w, "embed_tokens.weight": embedding, "lm_head.weight": head}
        stored |= {"confidence_head.proj.weight": drawn(264, 1, SIZE), "confidence_head.proj.bias": drawn(265, 1)}
    else:
        known = 97
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(6))[:known].sort().values
        head = drawn(261, known, SIZE)
        stored |= {"lm_head.weight": head, "d2t": ids - torch.arange(known), "verifier_norm.weight": drawn(266, SIZE)}
        stored["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, value=True)
        own = {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "block_size": 8}
        own |= {"aux_hidden_state_layer_ids": [layer + 1 for layer in reads], "mask_token_id": mask}
        config = {**own, "transformer_layer_config": config, "draft_vocab_size": known}
    write(folder, config, stored)

    def turned(x: torch.Tensor, first: int) -> torch.Tensor:
        angles = torch.outer(torch.arange(first, first + len(x)).float(), THETA ** (-torch.arange(0, DIM, 2) / DIM))
        cos, sin = (torch.cat([f(angles)] * 2, dim=-1)[:, None] for f in (torch.cos, torch.sin))
        one, other = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-other, one), dim=-1) * sin

    def convolved(y: torch.Tensor, side: int, own: Tensors, part: str, read: torch.Tensor) -> torch.Tensor:
        """Of y, a place at a time, weighed by what the part read."""
        if not is_second:
            return y
        added = F.linear(read, own[f"{part}_conv.kernel_projection.weight"]).view(len(y), 2, taps, -1)[:, side]
        weights = added.repeat_interleave(group, dim=-1) + own[f"{part}_conv.base_kernel"][side]
        places = [sum(weights[i, back] * y[i - back] for back in range(min(taps, i + 1))) for i in range(len(y))]
        return torch.stack([torch.as_tensor(place) for place in places])

    def run(context: torch.Tensor, x: torch.Tensor, own: Tensors, window: int | None) -> torch.Tensor:
        read = norm(x, own["input_layernorm.weight"])
        normed = convolved(read, 0, own, "attention", read)
        all_of = torch.cat((context, normed))

        def heads(y: torch.Tensor, name: str) -> torch.Tensor:
            return F.linear(y, own[f"self_attn.{name}_proj.weight"]).view(len(y), -1, DIM)

        q = turned(norm(heads(normed, "q"), own["self_attn.q_norm.weight"]), len(context))
        k = turned(norm(heads(all_of, "k"), own["self_attn.k_norm.weight"]), 0)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, heads(all_of, "v")))
        scores, places = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM), torch.arange(len(all_of))
        if window is not None:
            at = torch.full_like(places, len(places) - 1) if is_second else places  # the window ends with the block
            back = at[len(context) :, None] - places
            scores = scores.masked_fill((back < 0) | (back >= window), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1)
        x = x + convolved(F.linear(out, own["self_attn.o_proj.weight"]), 1, own, "attention", read)
        read = norm(x, own["post_attention_layernorm.weight"])
        normed = convolved(read, 0, own, "mlp", read)
        gate, up = (F.linear(normed, own[f"mlp.{name}.weight"]) for name in ("gate_proj", "up_proj"))
        return x + convolved(F.linear(F.silu(gate) * up, own["mlp.down_proj.weight"]), 1, own, "mlp", read)

    def drafts(tokens: list[int], count: int) -> list[int]:
        states = hidden_states(target, tokens)
        read = torch.cat([states[layer + 1] for layer in reads], dim=-1)
        context = norm(F.linear(read, w["fc.weight"]), w["hidden_norm.weight"])
        x = embedding[[tokens[-1], *[mask] * (count - is_spark)]]
        for i in range(2):
            x = run(context, x, named(w, f"layers.{i}."), windows[i])
        found, last = [], tokens[-1]
        features = norm(x[-count:], w["norm.weight"])
        for feature, logits in zip(features, F.linear(features, head), strict=True):
            if is_second:
                codes = (w[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
                before, behind = codes
                weighed = before[last] * (w["candidate_selector.hidden_projection.weight"] @ feature)
                kept = logits.topk(best).indices
                last = int(kept[(logits + behind @ weighed)[kept].argmax()])
                found.append(last)
                continue
            if is_spark:
                logits = logits + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][last]
            last = int(ids[logits.argmax()])
            found.append(last)
        return found

    return drafts


def draft_model(target: PreTrainedModel) -> Drafts:
    """The reference of any language model."""

    def drafts(tokens: list[int], count: int) -> list[int]:
        said = list(tokens)
        for _ in range(count):
            with torch.no_grad():
                said.append(int(target(torch.tensor([said])).logits[0, -1].argmax()))
        return said[len(tokens) :]

    return drafts
