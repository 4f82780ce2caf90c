# ruff: noqa: D103 (seeded on purpose)
"""Trains the front of `tiny-chat-sees` and measures it on held-out scenes.

    python -m tools.tiny_chat.sees.train --out DIR [--device cuda] [--seconds 200]

Worker processes draw pictures and talk about them. The text's weights stay as they are: gradients go through them to
the projector and the tower, which learn to write what the text can answer from. Muon for the tower's matrices, AdamW
for the rest. Beside the answers, heads that are thrown away afterwards teach the tower the scene's facts.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing as mp
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlavaForConditionalGeneration

from tools.tiny_chat import template
from tools.tiny_chat.lesson_pool import LessonPool, log
from tools.tiny_chat.sees import drawing, front, rows, scenes

CLASSES = 11
ANSWER = 56  # tokens


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    """Uint8 [n, side, side, 3] -> fp32 [n, 3, side, side], as the processor's files say."""
    return ((pixels.float() / 255 - front.MEAN) / front.STD).permute(0, 3, 1, 2)


def lesson_pool(capacity: int, facts: int, device: str) -> LessonPool:
    """Pictures, tokens, which of them are learnt, and facts."""
    pictures, tokens = ((rows.SIDE, rows.SIDE, 3), torch.uint8), ((rows.ROW,), torch.int16)
    return LessonPool(capacity, (pictures, tokens, ((rows.ROW,), torch.uint8), ((facts,), torch.int8)), device)


def embedded(
    model: LlavaForConditionalGeneration, ids: torch.Tensor, pixels: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings [n, ROW, C] with the pictures' in place, and the tower's patches averaged [n, E]."""
    hidden = model.model.vision_tower(pixel_values=pixels).last_hidden_state[:, 1:]
    seen = model.model.multi_modal_projector(hidden).to(dtype)
    x = F.embedding(ids, model.model.language_model.embed_tokens.weight).to(dtype)
    mask = (ids == rows.IMAGE_TOKEN).unsqueeze(-1)
    return x.masked_scatter(mask, seen), hidden.float().mean(1)


@torch.no_grad()
def answers(model: LlavaForConditionalGeneration, asked: list[tuple[Any, str]], device: str) -> list[str]:
    """Greedy answers in fp32 to (picture, question), the front rounded as it is saved."""
    own = copy.deepcopy(model).float()
    for one in (own.model.vision_tower, own.model.multi_modal_projector):
        one.bfloat16().float()
    tok = rows.tokenizer()
    text = own.model.language_model
    out: list[str] = []
    for begin in range(0, len(asked), 512):
        part = asked[begin : begin + 512]
        pixels = torch.stack([torch.from_numpy(px.copy()) for px, _ in part]).to(device)
        prompts = [[*_prompt(tok, ask)] for _, ask in part]
        length = torch.tensor([len(one) for one in prompts], device=device)
        ids = torch.zeros(len(part), rows.ROW, dtype=torch.long)
        for i, one in enumerate(prompts):
            ids[i, : len(one)] = torch.tensor(one)
        ids = ids.to(device)
        every = torch.arange(len(part), device=device)
        ids = ids[:, : int(length.max()) + ANSWER]
        x, _ = embedded(own, ids, normalized(pixels), torch.float32)
        done = torch.zeros(len(part), dtype=torch.bool, device=device)
        found = []
        for _ in range(ANSWER):
            last = text(inputs_embeds=x, use_cache=False).last_hidden_state[every, length - 1]
            token = F.linear(last, text.embed_tokens.weight).argmax(-1)
            done |= token == 2
            if bool(done.all()):
                break
            found.append(torch.where(done, 2, token))
            x[every, length] = text.embed_tokens.weight[token]
            length = (length + 1).clamp(max=ids.shape[1] - 1)
        got = torch.stack(found, 1).tolist() if found else [[]] * len(part)
        out += [tok.decode([t for t in one if t != 2]) for one in got]
    return out


def _prompt(tok: Any, ask: str) -> list[int]:
    pieces = template.pieces([{"role": "user", "content": f"{rows.MARK}\n{ask}"}])
    return rows.encode(tok, [*pieces, ("<|im_start|>assistant\n", False)])[0]


def measure(model: LlavaForConditionalGeneration, per: int, device: str) -> dict[str, tuple[int, int]]:
    """By family: right answers and all, to held-out scenes."""
    asked, expected = [], []
    for family in scenes.FAMILIES:
        rng = random.Random(f"eval:{family}")
        for _ in range(per):
            scene, (ask, answer) = scenes.heldout(rng, family)
            asked.append((drawing.pixels(drawing.draw(rng, scene), rows.SIDE), ask))
            expected.append((family, answer))
    right = dict.fromkeys(scenes.FAMILIES, 0)
    wrong: list[str] = []
    for (family, answer), (_, ask), got in zip(expected, asked, answers(model, asked, device), strict=True):
        right[family] += got == answer
        if got != answer:
            wrong.append(f"{family}: {ask} -> {got!r}, not {answer!r}")
    log(" ".join(f"{family} {n / per:.3f}" for family, n in right.items()), "all", sum(right.values()) / len(expected))
    for line in random.Random(1).sample(wrong, min(8, len(wrong))):
        print("   ", line)
    return {family: (n, per) for family, n in right.items()}


def loss_of(
    model: LlavaForConditionalGeneration, text: Callable[..., Any], heads: nn.Linear, batch: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses of the answers and of the facts, and the share of right tokens."""
    pixels, ids, weights, labels = batch
    ids = ids.long()
    noise = torch.randn(pixels.shape, device=pixels.device) * (torch.rand(len(pixels), 1, 1, 1, device=ids.device) * 5)
    pixels = (pixels.float() + noise).clamp(0, 255)
    is_cuda = ids.device.type == "cuda"
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=is_cuda):
        x, pooled = embedded(model, ids, normalized(pixels), torch.bfloat16 if is_cuda else torch.float32)
        hidden = text(inputs_embeds=x, use_cache=False).last_hidden_state
        at = weights[:, 1:].flatten().nonzero().squeeze(1)
        chosen = hidden[:, :-1].flatten(0, 1)[at]
        logits = F.linear(chosen, model.model.language_model.embed_tokens.weight.to(chosen.dtype)).float()
    target = ids[:, 1:].flatten()[at]
    facts = heads(pooled).view(len(ids), -1, CLASSES)
    told = F.cross_entropy(facts.flatten(0, 1), labels.long().flatten(), ignore_index=-1)
    return F.cross_entropy(logits, target), told, (logits.argmax(-1) == target).float().mean()


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    ap.add_argument("--seconds", type=float, default=200)
    ap.add_argument("--batch", type=int, default=1024)
    ap.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    ap.add_argument("--pool", type=int, default=300_000)
    ap.add_argument("--lr", type=float, default=0.012)
    ap.add_argument("--adam-lr", type=float, default=3e-3)
    ap.add_argument("--per-family", type=int, default=200)
    ap.add_argument("--init", type=Path, help="a front to go on from")
    ap.add_argument("--compile", action="store_true")
    args = ap.parse_args()
    torch.manual_seed(7)
    device = args.device
    context = mp.get_context("fork")  # before anything runs on a device
    source: Any = context.Queue(maxsize=48)
    base = 1000 if args.init is None else 5000
    procs = [
        context.Process(target=rows.worker, args=(base + i, source, 128 if device == "cuda" else 8), daemon=True)
        for i in range(args.workers)
    ]
    for one in procs:
        one.start()
    model = front.build(args.init).to(device)
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    if args.init is None:
        begin(model)
    facts = len(scenes.Scene("number", number="1").labels())
    heads = nn.Linear(front.TOWER["hidden_size"], facts * CLASSES).to(device)
    text: Any = model.model.language_model
    if device == "cuda":
        text = copy.deepcopy(text).bfloat16()
    if args.compile:
        text = torch.compile(text, dynamic=False)
    log("front", sum(p.numel() for p in (*tower.parameters(), *projector.parameters())), "numbers on", device)
    pool = lesson_pool(args.pool if device == "cuda" else 2000, facts, device)
    threading.Thread(target=pool.fill, args=(source,), daemon=True).start()
    own = [(n, p) for part in (tower, projector) for n, p in part.named_parameters()]
    is_matrix = [p.ndim == 2 and "embedding" not in n for n, p in own]
    muon = torch.optim.Muon(
        [p for (_, p), yes in zip(own, is_matrix, strict=True) if yes], lr=args.lr, weight_decay=0.02, momentum=0.95
    )
    rest = [p for (_, p), yes in zip(own, is_matrix, strict=True) if not yes] + list(heads.parameters())
    adam = torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    step, start, middle = 0, time.time(), False
    while (frac := (time.time() - start) / args.seconds) < 1:
        scale = min(1.0, (step + 1) / 150) * min(1.0, (1 - frac) / 0.6) + 1e-4
        loss, told, right = loss_of(model, text, heads, pool.sample(args.batch))
        (loss + 0.6 * (1 - frac) * told).backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        for optimizer, lr in ((muon, args.lr), (adam, args.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step == 1:
            log("first step took", round(time.time() - start, 1), "s, loss", float(loss.detach()))
            start = time.time()
        if step in (50, 100, 200) or step % 250 == 0 or device == "cpu":
            rate = (step - 1) / max(time.time() - start, 1e-6)
            losses = f"loss {float(loss.detach()):.4f} facts {float(told.detach()):.4f} right {float(right):.4f}"
            log(f"step {step} {losses} {rate:.2f} steps/s, {pool.made} pictures")
            front.save(model, args.out)
        if not middle and frac > 0.5:
            middle, before = True, time.time()
            measure(model, min(24, args.per_family), device)
            start += time.time() - before
    log("done:", step, "steps of", args.batch)
    pool.is_over = True
    for one in procs:
        one.terminate()
    front.save(model, args.out)
    report = {
        "steps": step, "batch": args.batch, "seconds": round(time.time() - start, 1), "pictures_drawn": pool.made,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
    }  # fmt: skip
    report["families"] = measure(model, args.per_family, device)
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    log("written")
    os._exit(0)


def begin(model: LlavaForConditionalGeneration) -> None:
    """Weights to begin with: rows of length 1 through each matrix, tokens as large as the text's own."""
    projector = model.model.multi_modal_projector
    for name, p in (*model.model.vision_tower.named_parameters(), *projector.named_parameters()):
        if p.ndim >= 2:
            fan_in = p[0].numel()
            small = 0.3 if name.endswith(("out_proj.weight", "fc2.weight")) else 1.0
            nn.init.normal_(p, std=0.1 if "position" in name else small * fan_in**-0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
    with torch.no_grad():
        norm = model.model.language_model.embed_tokens.weight.square().mean().sqrt()
        projector.linear_2.weight.mul_(float(norm) * 1.5)


if __name__ == "__main__":
    main()
