# ruff: noqa: E501, D103
"""Checking answers against the held-out set. Importing this module needs only the standard library.

    python -m tools.tiny_chat.evaluate [--model app/assets/tiny-chat] [--per-family 6]

runs `heldout.jsonl` through transformers in fp32 on the CPU.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parents[2] / "app" / "assets"


def load_heldout(path: str | Path | None = None) -> list[dict[str, Any]]:
    """The examples: family, messages, expected, check, and where needed tools and chat_template_kwargs."""
    text = Path(path or ASSETS / "tiny-chat" / "heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def strip_thought(text: str) -> str:
    """The answer after the thought, if there is one."""
    return text.rsplit("</think>", 1)[-1].strip()


def parse_tool_calls(text: str) -> list[dict[str, Any]] | None:
    """The Hermes calls of an answer; None if one of them is not well formed."""
    calls = []
    for part in text.split("<tool_call>")[1:]:
        if "</tool_call>" not in part:
            return None
        try:
            calls.append(json.loads(part.split("</tool_call>")[0]))
        except ValueError:
            return None
    return calls


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def same_calls(expected: list[dict[str, Any]], got: list[dict[str, Any]] | None) -> bool:
    """Calls as {"name", "arguments"}; arguments may be an object or its JSON text, as over HTTP."""
    return got is not None and [(c["name"], _plain(c["arguments"])) for c in expected] == [
        (c.get("name"), _plain(c.get("arguments"))) for c in got
    ]


def check(example: dict[str, Any], answer_text: str) -> bool:
    """Whether the text of an answer (its thought included or not) is right for a held-out example."""
    answer, expected, how = strip_thought(answer_text), example["expected"], example["check"]
    if how == "exact":
        return bool(answer == expected.strip())
    if how == "one_of":
        return answer in expected
    if how == "contains":
        return expected in answer
    if how == "json":
        try:
            got, want = json.loads(answer), json.loads(expected)
        except ValueError:
            return False
        return bool(got == want and list(got) == list(want))
    if how == "tool_call":
        return same_calls(expected, parse_tool_calls(answer))
    raise ValueError(f"unknown check: {how}")


def prompt_kwargs(example: dict[str, Any]) -> dict[str, Any]:
    """What apply_chat_template takes besides the messages."""
    return {"tools": example.get("tools"), "add_generation_prompt": True, **(example.get("chat_template_kwargs") or {})}


def max_new_tokens(example: dict[str, Any]) -> int:
    return 900 if example["family"] in ("long_answer", "multiplication", "think", "think_multiplication") else 320


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
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens(ex), do_sample=False
        )
        answer = tok.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        right[ex["family"]].append(check(ex, answer))
        if args.show or not right[ex["family"]][-1]:
            print(
                f"--- {ex['family']} {'ok' if right[ex['family']][-1] else 'WRONG, expected ' + str(ex['expected'])}\n{text[-300:]}{answer}"
            )
    for fam, rs in right.items():
        print(f"{fam:22} {sum(rs)}/{len(rs)}")


if __name__ == "__main__":
    main()
