# ruff: noqa: E501, D103
"""Trains `tiny-chat` and `tiny-chat-draft` in one run and measures both.

    python -m tools.tiny_chat.train --out DIR [--seconds 440] [--draft-seconds 50]

Worker processes generate conversations (families.py), tokenize them and pack them into rows of 4,096 tokens; attention stays
within a conversation. Muon for the matrices, AdamW for the rest, a learning rate that falls over the second half of the given
seconds. The draft then learns from the big model's distribution on the same rows. At the end both are saved as bf16
safetensors and measured in fp32 on held-out examples of every family.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing as mp
import os
import queue
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import numpy as np

ROW = 4096
T0 = time.time()


def log(*a: Any) -> None:
    print(f"[{time.time() - T0:6.1f}s]", *a, flush=True)


# ---------------------------------------------------------------- data


def rows(seed: int, tok_path: str, n_rows: int, row: int = ROW):
    """Packed rows for ever: (tokens, document number, loss weight), each [n_rows, row]."""
    from tokenizers import Tokenizer

    from . import families, template

    tok = Tokenizer.from_file(tok_path)
    rng = random.Random(seed)
    waiting: list[tuple[list[int], list[int]]] = []
    while True:
        T = np.zeros((n_rows, row), np.int16)
        D = np.zeros((n_rows, row), np.int16)
        L = np.zeros((n_rows, row), np.uint8)
        for i in range(n_rows):
            used, doc = 0, 0
            while used < row - 8:
                if len(waiting) < 48:
                    parts: list[tuple[str, bool]] = []
                    bounds = []
                    for _ in range(64):
                        if rng.random() < 0.015:
                            p = [(families.completion(rng), True), ("<|endoftext|>", True)]
                        else:
                            msgs, tools, open_think = families.conversation(rng)
                            p = template.pieces(msgs, tools, open_think)
                        bounds.append(len(p))
                        parts += p
                    enc = tok.encode_batch([t for t, _ in parts], add_special_tokens=False)
                    at = 0
                    for b in bounds:
                        ids: list[int] = []
                        w: list[int] = []
                        for e, (_, target) in zip(enc[at : at + b], parts[at : at + b], strict=True):
                            ids += e.ids
                            w += [20 if target else 1] * len(e.ids)
                        at += b
                        if len(ids) <= row:
                            waiting.append((ids, w))
                fit = [j for j, (x, _) in enumerate(waiting) if len(x) <= row - used]
                if not fit:
                    break
                j = fit[0] if row - used > 1200 else max(fit, key=lambda k: len(waiting[k][0]))
                ids, w = waiting.pop(j)
                T[i, used : used + len(ids)] = ids
                L[i, used : used + len(ids)] = w
                D[i, used : used + len(ids)] = doc
                used += len(ids)
                doc += 1
            D[i, used:] = doc
        yield T, D, L


def worker(seed: int, tok_path: str, out: Any, n_rows: int, row: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for item in rows(seed, tok_path, n_rows, row):
        out.put(item)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out", required=True)
    ap.add_argument("--seconds", type=float, default=440)
    ap.add_argument("--draft-seconds", type=float, default=50)
    ap.add_argument(
        "--deadline", type=float, default=565, help="seconds after the start by which everything is written"
    )
    ap.add_argument("--batch", type=int, default=32, help="rows a step")
    ap.add_argument("--row", type=int, default=ROW)
    ap.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    ap.add_argument("--per-family", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--adam-lr", type=float, default=4e-3)
    ap.add_argument("--init", help="a model folder to continue from")
    ap.add_argument("--max-steps", type=int, default=10**9)
    ap.add_argument("--no-compile", action="store_true")
    args = ap.parse_args()

    assets = Path(__file__).resolve().parents[2] / "app" / "assets"
    tok_path = str(assets / "tiny-chat" / "tokenizer.json")
    ctx = mp.get_context("spawn")
    q: Any = ctx.Queue(maxsize=64)
    procs = [
        ctx.Process(
            target=worker,
            args=(1000 + i + (777 if args.init else 0), tok_path, q, 16 if args.row == ROW else 2, args.row),
            daemon=True,
        )
        for i in range(args.workers)
    ]
    for p in procs:
        p.start()

    import torch
    import torch.nn.functional as F

    from . import model as M

    torch.manual_seed(7)
    cuda = torch.cuda.is_available()
    dev = "cuda" if cuda else "cpu"
    torch.set_float32_matmul_precision("high")
    cfg = json.loads((assets / "tiny-chat" / "config.json").read_text())
    dcfg = json.loads((assets / "tiny-chat-draft" / "config.json").read_text())
    big = M.Llama(cfg).to(dev)
    if args.init:
        from safetensors.torch import load_file

        big.load_state_dict({k: v.float() for k, v in load_file(args.init + "/model.safetensors").items()})
    n_par = sum(p.numel() for p in big.parameters())
    log("parameters", n_par, "device", torch.cuda.get_device_name() if cuda else "cpu")

    # the pool of rows, filled by a thread; fresh rows first, then again from the pool
    B, R = args.batch, args.row
    cap = 350_000 if cuda else 64
    pool = [torch.zeros(cap, R, dtype=dt, device=dev) for dt in (torch.int16, torch.int16, torch.uint8)]
    state = {"n": 0, "next": 0, "stop": False}

    def fill() -> None:
        while not state["stop"] and state["n"] < cap:
            try:
                item = q.get(timeout=1)
            except queue.Empty:
                continue
            n = state["n"]
            k = min(len(item[0]), cap - n)
            for dst, src in zip(pool, item, strict=True):
                dst[n : n + k] = torch.from_numpy(src[:k]).to(dev)
            state["n"] = n + k

    th = threading.Thread(target=fill, daemon=True)
    th.start()
    doc_buf = torch.zeros(B, R, dtype=torch.int32, device=dev)
    gen = torch.Generator(device="cpu").manual_seed(3)

    def mask_mod(b: Any, h: Any, qi: Any, ki: Any) -> Any:
        return (qi >= ki) & (doc_buf[b, qi] == doc_buf[b, ki])

    def batch() -> tuple[Any, ...]:
        while state["n"] < B:
            time.sleep(0.01)
        if state["next"] + B <= state["n"]:
            s = slice(state["next"], state["next"] + B)
            state["next"] += B
            t, d, w = (x[s] for x in pool)
        else:
            i = torch.randint(0, state["n"], (B,), generator=gen).to(dev)
            t, d, w = (x[i] for x in pool)
        doc_buf.copy_(d)
        ids = t.long()
        tgt = torch.cat((ids[:, 1:], torch.zeros_like(ids[:, :1])), 1)
        ww = torch.cat((w[:, 1:], torch.zeros_like(w[:, :1])), 1).float() / 20
        same = torch.cat((d[:, 1:] == d[:, :-1], torch.zeros_like(d[:, :1], dtype=torch.bool)), 1)
        if not cuda:  # flex attention has no backward there
            return (
                ids,
                tgt,
                ww * same,
                ((d[:, None, :, None] == d[:, None, None, :]) & torch.ones(R, R, dtype=torch.bool).tril()),
            )
        return ids, tgt, ww * same, M.document_mask(doc_buf, mask_mod)

    cos, sin = M.rope(R, cfg["head_dim"], cfg["rope_theta"], dev)

    def loss_fn(m: Any, ids: Any, tgt: Any, w: Any, mask: Any) -> Any:
        with torch.autocast(dev, torch.bfloat16):
            lg = m(ids, cos, sin, mask)
        ce = F.cross_entropy(lg.float().view(-1, lg.shape[-1]), tgt.view(-1), reduction="none")
        w = w.view(-1)
        ok = (w > 0.5).float()
        return (
            (ce * w).sum() / w.sum(),
            (ce.detach() * ok).sum() / ok.sum(),
            ((lg.argmax(-1).view(-1) == tgt.view(-1)).float() * ok).sum() / ok.sum(),
        )

    def distill_fn(m: Any, teacher: Any, ids: Any, tgt: Any, w: Any, mask: Any) -> Any:
        with torch.autocast(dev, torch.bfloat16):
            with torch.no_grad():
                lt = teacher(ids, cos, sin, mask).float()
            ls = m(ids, cos, sin, mask).float()
        w = w.view(-1)
        ok = (w > 0.5).float()
        kl = F.kl_div(F.log_softmax(ls, -1), F.log_softmax(lt, -1), log_target=True, reduction="none").sum(-1).view(-1)
        agree = ((ls.argmax(-1) == lt.argmax(-1)).view(-1).float() * ok).sum() / ok.sum()
        return (kl * w).sum() / w.sum(), (kl.detach() * ok).sum() / ok.sum(), agree

    if not args.no_compile:
        loss_fn = torch.compile(loss_fn, dynamic=False)
        distill_fn = torch.compile(distill_fn, dynamic=False)

    def newton_schulz(g: Any) -> Any:
        x = g.bfloat16()
        if tall := x.shape[-2] > x.shape[-1]:
            x = x.mT
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x.mT if tall else x

    class Muon:
        def __init__(self, m: Any) -> None:
            mats = [p for n, p in m.named_parameters() if p.ndim == 2 and "embed" not in n]
            self.groups = [[p for p in mats if p.shape == s] for s in {p.shape for p in mats}]
            self.mom = [torch.zeros(len(g), *g[0].shape, device=dev) for g in self.groups]

        @torch.no_grad()
        def step(self, lr: float) -> None:
            for g, mom in zip(self.groups, self.mom, strict=True):
                grad = torch.stack([p.grad for p in g])
                mom.lerp_(grad, 0.05)
                u = newton_schulz(grad.lerp(mom, 0.95)).float() * max(1, g[0].shape[0] / g[0].shape[1]) ** 0.5
                for p, x in zip(g, u.unbind(), strict=True):
                    p.mul_(1 - lr * 0.02).add_(x, alpha=-lr)

    def fit(m: Any, seconds: float, lr: float, alr: float, fn: Any, tag: str, eval_at: list[float]) -> int:
        muon = Muon(m)
        rest = [p for n, p in m.named_parameters() if p.ndim < 2 or "embed" in n]
        adam = torch.optim.AdamW(rest, lr=alr, betas=(0.9, 0.98), weight_decay=0.0, fused=cuda)
        step, start, first = 0, time.time(), 0.0
        while step < args.max_steps:
            frac = (time.time() - start) / seconds if seconds else 1.0
            if frac >= 1 or time.time() - T0 > args.deadline - 35:
                break
            scale = min(1.0, (step + 1) / 150) * min(1.0, max(0.0, (1 - frac) / 0.55)) + 1e-4
            ids, tgt, w, mask = batch()
            loss, target_loss, acc = fn(m, ids, tgt, w, mask)
            loss.backward()
            for gp in adam.param_groups:
                gp["lr"] = alr * scale
            muon.step(lr * scale)
            adam.step()
            for p in m.parameters():
                p.grad = None
            step += 1
            if step == 1:
                float(loss)
                log(tag, "first step took", round(time.time() - start, 1), "s; rows in the pool:", state["n"])
                first = start = time.time()
            if step in (50, 200) or step % 500 == 0 or not cuda:
                a, b, c = float(loss), float(target_loss), float(acc)
                now = time.time()
                log(
                    f"{tag} step {step} loss {a:.4f} target {b:.5f} agree {c:.5f} {(step - 1) * B * R / (now - first + 1e-9) / 1e6:.2f}M tok/s; pool {state['n'] * R / 1e6:.0f}M tokens, fresh used {state['next'] / max(1, state['n']):.2f}"
                )
            if eval_at and frac > eval_at[0] and step > 10:
                eval_at.pop(0)
                t = time.time()
                measure(m, 24, tag)
                start, first = start + time.time() - t, first + time.time() - t
        log(tag, "last loss", float(loss.detach()) if step else None)
        log(tag, "done:", step, "steps,", round(step * B * R / 1e6), "M tokens,", round(time.time() - start, 1), "s")
        return step

    from transformers import PreTrainedTokenizerFast

    from app.quantize.questions import is_right, longest_answer

    from . import evaluate as E
    from . import families

    tok = PreTrainedTokenizerFast.from_pretrained(str(assets / "tiny-chat"))
    stop_id = tok.convert_tokens_to_ids("<|im_end|>")

    def examples(per: int, seed: str) -> list[dict[str, Any]]:
        out, seen = [], set()
        for fam in families.EVAL_FAMILIES:
            rng, n, tries = random.Random(f"{seed}:{fam}"), 0, 0
            while n < per and tries < per * 20:
                tries += 1
                ex = families.heldout(fam, rng)
                key = json.dumps(ex["messages"])
                if key not in seen:
                    seen.add(key)
                    out.append(ex)
                    n += 1
        return out

    def measure(m: Any, per: int, tag: str, seed: str = "eval") -> tuple[dict[str, Any], list[dict[str, Any]]]:
        t = time.time()
        torch.set_float32_matmul_precision("highest")
        exs = examples(per, seed)
        prompts = [
            tok(tok.apply_chat_template(e["messages"], tokenize=False, **E.prompt_kwargs(e)), add_special_tokens=False)[
                "input_ids"
            ]
            for e in exs
        ]
        ref = copy.deepcopy(m).bfloat16().float().eval()
        res: dict[str, list[int]] = {f: [0, 0] for f in families.EVAL_FAMILIES}
        bad = []
        for limit in sorted({longest_answer(e) for e in exs}):
            part = [i for i, e in enumerate(exs) if longest_answer(e) == limit]
            got = M.generate(ref, [prompts[i] for i in part], limit, stop_id, budget=1_500_000 if cuda else 60_000)
            for i, g in zip(part, got, strict=True):
                text = tok.decode(g, skip_special_tokens=True)
                ok = is_right(exs[i], text)
                res[exs[i]["family"]][0] += ok
                res[exs[i]["family"]][1] += 1
                if not ok:
                    bad.append(
                        {
                            "family": exs[i]["family"],
                            "prompt": exs[i]["messages"][-1]["content"][-300:],
                            "expected": exs[i]["expected"],
                            "got": text,
                        }
                    )
        torch.set_float32_matmul_precision("high")
        low = {f: f"{a}/{n}" for f, (a, n) in res.items() if a < n}
        log(
            tag,
            f"held-out: {sum(a for a, _ in res.values())}/{sum(n for _, n in res.values())} in {time.time() - t:.1f} s; not whole: {low}",
        )
        return {f: {"right": a, "n": n} for f, (a, n) in res.items()}, bad

    def save(m: Any, sub: str) -> None:
        from safetensors.torch import save_file

        d = out / sub
        d.mkdir(parents=True, exist_ok=True)
        save_file(
            {k: v.detach().to(torch.bfloat16).cpu().contiguous() for k, v in m.state_dict().items()},
            str(d / "model.safetensors"),
            metadata={"format": "pt"},
        )

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    steps = fit(big, args.seconds, args.lr, args.adam_lr, loss_fn, "big", [0.5] if cuda and not args.init else [])
    train_seconds = time.time() - started
    save(big, "tiny-chat")
    report: dict[str, Any] = {
        "parameters": n_par,
        "steps": steps,
        "tokens": steps * B * R,
        "fresh_tokens": state["n"] * R,
        "train_seconds": round(train_seconds, 1),
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "command": "python -m tools.tiny_chat.train "
        + " ".join(f"--{k} {getattr(args, k.replace('-', '_'))}" for k in ("seconds", "draft-seconds")),
    }
    draft = M.Llama(dcfg).to(dev)
    if args.draft_seconds > 0:
        report["draft_parameters"] = sum(p.numel() for p in draft.parameters())
        teacher = big.requires_grad_(False)
        agree: list[float] = []

        def draft_loss(m: Any, *a: Any) -> Any:
            r = distill_fn(m, teacher, *a)
            agree.append(r[2])
            return r

        started = time.time()
        report["draft_steps"] = fit(draft, args.draft_seconds, args.lr, args.adam_lr, draft_loss, "draft", [])
        report["draft_seconds"] = round(time.time() - started, 1)
        if agree:
            report["draft_agreement_per_token"] = round(float(sum(float(x) for x in agree[-20:]) / len(agree[-20:])), 4)
        save(draft, "tiny-chat-draft")
    state["stop"] = True
    for p in procs:
        p.terminate()
    (out / "report.json").write_text(json.dumps(report, indent=1))
    report["families"], bad = measure(big, args.per_family, "final")
    (out / "report.json").write_text(json.dumps(report, indent=1))
    (out / "wrong.json").write_text(json.dumps(bad[:400], indent=1, ensure_ascii=False))
    if args.draft_seconds > 0 and time.time() - T0 < args.deadline - 20:
        report["draft_families"], _ = measure(draft, 32, "draft final")
    (out / "report.json").write_text(json.dumps(report, indent=1))
    log("written; draft agreement", report.get("draft_agreement_per_token"))
    os._exit(0)


if __name__ == "__main__":
    main()
