# ruff: noqa: D103
"""Trains `tiny-chat-eagle3`, an EAGLE-3 head that drafts for tiny-chat, in minutes on a GPU (or on a CPU's cores).

    python -m tools.tiny_chat.eagle.train --out DIR [--device cuda] [--seconds 170] [--data-seconds 40]

After Li et al., 2025: one layer reads the next token's embedding and what layers of the target read, and is taught what
the target says, also behind tokens of its own (`UNROLLED` passes, each of which reads the features of the pass before,
as when it drafts). It learns from training conversations of the families (families.py), made up by worker processes,
and from what tiny-chat itself goes on to say behind other openings, until the given seconds are over, which the
learning rate follows. Now and then it is measured on held-out questions: DIR gets the best head so far, and
`training.json`. How often the shipped one is right, and what it brings: benchmarks/built_in_drafts.py.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.checkpoints.model_info import ASSETS
from tools.tiny_chat.eagle.head import CONFIG, KNOWN, UNROLLED, Head, Lesson, lesson, passes
from tools.tiny_chat.eagle.lessons import (
    TARGET,
    Spoken,
    batches,
    continued,
    conversations,
    held_out,
    load_target,
    openings,
    padded,
)
from tools.tiny_chat.model import Llama

LOOKS = 8  # measurements in a training


def gather(target: Llama, args: argparse.Namespace) -> list[Spoken]:
    """Conversations, and what the target says itself, which counts twice: there is less of it."""
    device, spoken, own, begin = target.model.embed_tokens.weight.device, [], [], time.monotonic()
    seed, waiting = 1_000_000 * args.seed + 5, []
    for part in conversations(seed, args.tokens, args.workers, args.data_seconds):
        spoken += part
        waiting += part
        has_time = time.monotonic() - begin < 0.8 * args.data_seconds
        if len(waiting) < args.openings or not has_time or told(own) > args.share * args.tokens:
            continue
        own += continued(target, openings(waiting, len(own)), 192)
        waiting = []
    what = f"{told(spoken):,} tokens made up, {told(own):,} with the target's own"
    print(f"{what}, on {device}, {since(begin)}", flush=True)
    return spoken + 2 * own


def told(spoken: list[Spoken]) -> int:
    """Tokens in all."""
    return sum(len(ids) for ids, _ in spoken)


def frequent(spoken: list[Spoken]) -> Tensor:
    """int64 [KNOWN] the tokens that are said most often, ascending."""
    counts = np.zeros(CONFIG["vocab_size"], np.int64)
    for ids, own in spoken:
        counts += np.bincount(ids[own], minlength=len(counts))
    most = torch.from_numpy(counts).topk(KNOWN)
    print(f"{KNOWN} tokens are {float(most.values.sum() / counts.sum()):.6f} of what is said", flush=True)
    return most.indices.sort().values


def tokens_of(directory: Path) -> Tensor:
    """Those that a trained head knows."""
    return load_file(str(directory / "model.safetensors"))["d2t"] + torch.arange(KNOWN)


@torch.no_grad()
def measured(head: Head, known: Tensor, lessons: list[Lesson]) -> dict[str, Any]:
    """Of each draft how often it is right where those before it are, and how many tokens a step would bring."""
    right, told = torch.zeros(UNROLLED), torch.zeros(UNROLLED)
    for one in lessons:
        _, each, valid = passes(head, known, one)
        right += each.cumprod(0).flatten(1).sum(1).cpu()
        told += valid.flatten(1).sum(1).cpu()
    shares = right / told
    return {"tokens_per_step": 1 + float(shares.sum()), "right": [round(share, 4) for share in shares.tolist()]}


def train(target: Llama, known: Tensor, spoken: list[Spoken], held: list[Lesson], args: argparse.Namespace) -> None:
    """Until the time is over; `args.out` holds the best head so far."""
    torch.manual_seed(args.seed)
    device = known.device
    rng, head = random.Random(args.seed), Head(CONFIG).to(device)
    if args.init is not None:
        stored = load_file(str(args.init / "model.safetensors"))
        head.load_state_dict({name: tensor.float() for name, tensor in stored.items() if name != "d2t"})
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and "embed" not in name and "lm_" not in name]
    rates: list[tuple[torch.optim.Optimizer, float]] = []
    if args.muon:
        muon = torch.optim.Muon(matrices, lr=args.muon, weight_decay=0.0, adjust_lr_fn="original")
        rates.append((muon, args.muon))
    others = [p for p in head.parameters() if not args.muon or not any(p is one for one in matrices)]
    rates.append((torch.optim.AdamW(others, lr=args.adam, betas=(0.9, 0.98), weight_decay=0.0), args.adam))
    order: list[list[Spoken]] = []
    step, rounds, looks, best, begin = 0, 0, 0, 0.0, time.monotonic()
    while True:
        done = min(1.0, (time.monotonic() - begin) / args.seconds)
        if done >= (looks + 1) / LOOKS:
            looks, found = looks + 1, measured(head, known, held)
            print(f"step {step}, {rounds} times over, {since(begin)}: {found}", flush=True)
            if found["tokens_per_step"] > best:
                best = found["tokens_per_step"]
                arguments = {name: str(value) for name, value in vars(args).items() if name != "out"}
                save(head, known, args.out, {**found, "steps": step, "arguments": arguments})
            if done == 1:
                return
        if not order:
            rounds, order = rounds + 1, batches(spoken, args.batch)
            rng.shuffle(order)
        for optimizer, rate in rates:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 100) * max(0.002, min(1.0, (1 - done) / 0.7))
        one = lesson(target, *padded(order.pop(), device))
        with torch.autocast(device.type, torch.bfloat16):
            loss, _, _ = passes(head, known, one)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer, _ in rates:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step in (1, 20, 100) or step % 500 == 0:
            print(f"step {step}, {since(begin)}: loss {float(loss.detach()):.4f}", flush=True)


def since(begin: float) -> str:
    return f"{time.monotonic() - begin:.0f} s"


def save(head: Head, known: Tensor, out: Path, report: dict[str, Any]) -> None:
    """A checkpoint as EAGLE-3's authors publish them, and how it came about."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in head.state_dict().items()}
    tensors["d2t"] = known.cpu() - torch.arange(KNOWN)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-chat-eagle3")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=170, help="of training")
    parser.add_argument("--data-seconds", type=float, default=40, help="the most for making conversations up")
    parser.add_argument("--tokens", type=int, default=12_000_000, help="of conversations")
    parser.add_argument("--share", type=float, default=0.4, help="of so many tokens that the target says itself")
    parser.add_argument("--batch", type=int, default=49_152, help="tokens of a batch with its padding")
    parser.add_argument("--workers", type=int, default=6, help="processes that make conversations up")
    parser.add_argument("--adam", type=float, default=3e-3, help="AdamW's learning rate")
    parser.add_argument("--muon", type=float, default=0.01, help="Muon's, for the matrices; 0: AdamW for all")
    parser.add_argument("--held", type=int, default=8, help="held-out questions of each family")
    parser.add_argument("--openings", type=int, default=2048, help="behind which the target speaks at a time")
    parser.add_argument("--init", type=Path, help="a head to go on with")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    device = torch.device(args.device)
    target = load_target(TARGET, device)
    held = [lesson(target, *padded(rows, device)) for rows in batches(held_out(target, args.held, 160), args.batch)]
    torch.set_float32_matmul_precision("high")
    spoken = gather(target, args)
    known = frequent(spoken) if args.init is None else tokens_of(args.init)
    train(target, known.to(device), spoken, held, args)


if __name__ == "__main__":
    main()
