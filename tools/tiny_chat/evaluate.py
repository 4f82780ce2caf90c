# ruff: noqa: E501, D103
"""Checking answers against the held-out set. How an answer is judged: app/quantize/questions.py.

    python -m tools.tiny_chat.evaluate [--model app/assets/tiny-chat] [--per-family 6]

runs `heldout.jsonl` through transformers in fp32 on the CPU.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from app.quantize.questions import is_right, longest_answer, read_questions

ASSETS = Path(__file__).resolve().parents[2] / "app" / "assets"


def load_heldout() -> list[dict[str, Any]]:
    """The examples: family, messages, expected, check, and where needed tools and chat_template_kwargs."""
    return read_questions(ASSETS / "tiny-chat")


def prompt_kwargs(example: dict[str, Any]) -> dict[str, Any]:
    """What apply_chat_template takes besides the messages."""
    return {"tools": example.get("tools"), "add_generation_prompt": True, **(example.get("chat_template_kwargs") or {})}


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--model", default=str(ASSETS / "tiny-chat"))
    ap.add_argument("--per-family", type=int, default=6)
    ap.add_argument("--show", action="store_true")
    args = ap.parse_args()
    tok = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    right: dict[str, list[bool]] = defaultdict(list)
    for ex in load_heldout():
        if len(right[ex["family"]]) >= args.per_family:
            continue
        text = tok.apply_chat_template(ex["messages"], tokenize=False, **prompt_kwargs(ex))
        enc = tok(text, return_tensors="pt", add_special_tokens=False)
        ids = enc["input_ids"]
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest_answer(ex), do_sample=False
        )
        answer = tok.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        right[ex["family"]].append(is_right(ex, answer))
        if args.show or not right[ex["family"]][-1]:
            print(
                f"--- {ex['family']} {'ok' if right[ex['family']][-1] else 'WRONG, expected ' + str(ex['expected'])}\n{text[-300:]}{answer}"
            )
    for fam, rs in right.items():
        print(f"{fam:22} {sum(rs)}/{len(rs)}")


if __name__ == "__main__":
    main()
