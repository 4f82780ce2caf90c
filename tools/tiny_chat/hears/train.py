"""Trains `tiny-chat-hears` and measures it on phrases and speakers that it never heard.

    python -m tools.tiny_chat.hears.train --out DIR [--device cuda] [--seconds 140]

Worker processes speak (espeak-ng). Muon for matrices, AdamW for the rest. Beside the transcript, a head that is thrown
away afterwards has the encoder itself spell the words (CTC: Graves et al., 2006): so the decoder learns where to look.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import WhisperForConditionalGeneration

from tools.tiny_chat.hears import lessons, phrases
from tools.tiny_chat.hears.model import END, NO_TIMES, START, build, token, tokenizer, write
from tools.tiny_chat.hears.speech import Synthesizer, heard, spoken
from tools.tiny_chat.lesson_pool import LessonPool, log


def lesson_pool(capacity: int, device: str) -> LessonPool:
    """Sounds, tokens, and which of them are learnt."""
    parts = (((lessons.COUNT,), torch.int16), ((lessons.ROW,), torch.int16), ((lessons.ROW,), torch.bool))
    return LessonPool(capacity, parts, device)


def losses(
    model: WhisperForConditionalGeneration, head: nn.Linear, ears: lessons.Ears, batch: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the tokens, of the encoder's spelling, and the share of right tokens."""
    windows, rows, learnt = batch
    rows = rows.long()
    features = ears(windows)
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.device.type == "cuda"):
        states = model.model.encoder(features).last_hidden_state
        hidden = model.model.decoder(input_ids=rows[:, :-1], encoder_hidden_states=states).last_hidden_state
        at = learnt[:, 1:]
        logits = model.proj_out(hidden[at]).float()
        spelt = head(states).float()
    target = rows[:, 1:][at]
    is_word = learnt & (rows < token(END))
    counts = is_word.sum(1)
    texts = rows[is_word]  # one behind the other
    steps = torch.full((len(rows),), states.shape[1], dtype=torch.long)
    blank = head.out_features - 1
    logs = spelt.log_softmax(-1).transpose(0, 1)
    ctc = F.ctc_loss(logs, texts, steps.to(texts.device), counts, blank=blank, zero_infinity=True)
    right = (logits.argmax(-1) == target).float().mean()
    return F.cross_entropy(logits, target), ctc, right


@torch.no_grad()
def transcripts(model: WhisperForConditionalGeneration, windows: torch.Tensor, ears: lessons.Ears) -> list[str]:
    """Greedy, without times."""
    states = model.model.encoder(ears(windows)).last_hidden_state
    rows = torch.tensor([[token(START), token(NO_TIMES)]], device=windows.device).repeat(len(windows), 1)
    for _ in range(28):
        hidden = model.model.decoder(input_ids=rows, encoder_hidden_states=states).last_hidden_state[:, -1]
        rows = torch.cat([rows, model.proj_out(hidden).argmax(-1, keepdim=True)], 1)
    found = []
    for row in rows[:, 2:].tolist():
        kept = row[: row.index(token(END))] if token(END) in row else row
        found.append(tokenizer().decode([one for one in kept if one < token(END)]).strip())
    return found


def wrong_words(said: str, written: str) -> int:
    """Words that are to be put in, left out or changed to make one of the other."""
    before = list(range(len(written.split()) + 1))
    for place, word in enumerate(said.split(), 1):
        row = [place]
        for other, found in enumerate(written.split(), 1):
            row.append(min(before[other] + 1, row[-1] + 1, before[other - 1] + (word != found)))
        before = row
    return before[-1]


def held_out(family: str, count: int) -> tuple[torch.Tensor, list[str]]:
    """Windows of phrases that are held out, by speakers that are."""
    synthesizer, rng, windows, texts = Synthesizer(), random.Random(f"held:{family}"), [], []
    for _ in range(count):
        said = phrases.phrase(rng, family, is_held=True)
        window, _ = heard(spoken(synthesizer, rng, said, is_held=True), rng, lessons.COUNT)
        windows.append(np.rint(window * 32_767).astype(np.int16))
        texts.append(said)
    return torch.from_numpy(np.stack(windows)), texts


def measure(model: WhisperForConditionalGeneration, ears: lessons.Ears, count: int, device: str) -> dict[str, float]:
    """Word errors by family, on what is held out, with weights in 16 bits."""
    own = build().to(device)
    own.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    found: dict[str, float] = {}
    for family in phrases.FAMILIES:
        windows, texts = held_out(family, count)
        written = transcripts(own.eval(), windows.to(device), ears)
        errors = sum(map(wrong_words, texts, written))
        found[family] = errors / sum(len(text.split()) for text in texts)
        for said, got in [pair for pair in zip(texts, written, strict=True) if pair[0] != pair[1]][:2]:
            print(f"    {said!r} -> {got!r}")
    log("word errors", {family: round(error, 4) for family, error in found.items()})
    return found


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--workers", type=int, default=min(8, max(1, len(os.sched_getaffinity(0)) - 3)))
    parser.add_argument("--pool", type=int, default=60_000)
    parser.add_argument("--lr", type=float, default=0.01, help="Muon's.")
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1000, help="Of the first worker.")
    parser.add_argument("--held", type=int, default=200, help="Held-out phrases of each family.")
    args = parser.parse_args()
    device: str = args.device
    tokenizer()
    context = mp.get_context("fork")  # before anything runs on a device
    source: Any = context.Queue(maxsize=24)
    size = 64 if device == "cuda" else 16
    processes = [
        context.Process(target=lessons.worker, args=(args.seed + number, source, size), daemon=True)
        for number in range(args.workers)
    ]
    for one in processes:
        one.start()
    model, ears = build().to(device), lessons.Ears(device)
    head = nn.Linear(model.config.d_model, token(END) + 1).to(device)
    log(sum(weight.numel() for weight in model.parameters()), "numbers on", device)
    pool = lesson_pool(args.pool if device == "cuda" else 3000, device)
    threading.Thread(target=pool.fill, args=(source,), daemon=True).start()
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    rest = [weight for name, weight in named if weight.ndim != 2 or "embed" in name] + list(head.parameters())
    muon = torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.02, momentum=0.95)
    adam = torch.optim.AdamW(rest, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    pool.sample(min(args.batch, 64))
    step, start = 0, time.time()
    while (share := (time.time() - start) / args.seconds) < 1:
        scale = min(1.0, (step + 1) / 150) * min(1.0, (1 - share) / 0.6) + 1e-4
        loss, ctc, right = losses(model, head, ears, pool.sample(args.batch))
        (loss + 0.3 * (1 - share) * ctc).backward()
        nn.utils.clip_grad_norm_([*matrices, *rest], 1.0)
        for optimizer, rate in ((muon, args.lr), (adam, args.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step in (1, 20, 100) or step % 500 == 0 or (device == "cpu" and step % 25 == 0):
            figures = f"loss {float(loss.detach()):.4f} ctc {float(ctc.detach()):.3f} right {float(right):.4f}"
            log(f"step {step} {figures} {step / (time.time() - start):.2f} steps/s, {pool.made} phrases spoken")
            write(model, args.out)
    pool.is_over = True
    for one in processes:
        one.terminate()
    write(model, args.out)
    report = {
        "steps": step, "batch": args.batch, "seconds": round(time.time() - start, 1), "phrases_spoken": pool.made,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "word_errors": measure(model, ears, args.held, device),
    }  # fmt: skip
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    log("written:", report)
    os._exit(0)


if __name__ == "__main__":
    main()
