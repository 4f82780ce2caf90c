# ruff: noqa: E501, D103
"""Writes the held-out file and the model card of `tiny-chat`.

python -m tools.tiny_chat.card --heldout 14     # app/assets/tiny-chat/heldout.jsonl
python -m tools.tiny_chat.card                  # README.md from metrics.json
python -m tools.tiny_chat.card --draft          # measures the draft's agreement into metrics.json (transformers, CPU)
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from app.quantize.questions import longest_answer

from . import families
from .evaluate import ASSETS, load_heldout, prompt_kwargs

BIG = ASSETS / "tiny-chat"

HELD = {
    "addition": "operand pairs, up to 3 digits",
    "subtraction": "operand pairs",
    "multiplication": "pairs of 2 × 2 and 3 × 1 digits, worked out in the open",
    "times_table": "nothing: the small table is taught whole",
    "big_addition": "operand pairs of 4 and 5 digits, worked out in the open",
    "word_problem": "operands and names",
    "chain": "operand triples of sums; with a minus the last operand is drawn afterwards, so a few questions may occur in training",
    "compare": "number pairs and lists",
    "number_words": "numbers",
    "repeat": "texts and codes",
    "reverse": "words and lists",
    "sort": "number lists and word lists",
    "case": "words and phrases",
    "spell": "words",
    "counting": "ranges, steps and lists",
    "letter_count": "words",
    "pick": "lists",
    "recall": "names, numbers, words told earlier",
    "recall_long": "names and values in texts of 300 to 2,600 tokens",
    "not_told": "nothing: questions about things never said",
    "facts": "combinations of fact and wording (every fact is taught)",
    "json": "schemas and values",
    "tool_call": "names of made-up and renamed tools; argument values that are names, words, cities or long numbers (well-known tools, dates, small numbers are not held out)",
    "tool_result": "the same, with the result read back",
    "no_tool": "as the family asked",
    "small_talk": "wordings",
    "about_self": "wordings",
    "about_manta": "wordings",
    "refusal": "wordings, names, words",
    "long_answer": "names, subjects, ranges",
    "persona": "names",
    "style": "content and words",
    "follow_up": "content of the first question",
    "think": "as the family asked, with enable_thinking",
    "think_multiplication": "operand pairs",
    "think_addition": "operand pairs",
}


def write_heldout(per: int) -> None:
    lines = []
    for fam in families.EVAL_FAMILIES:
        rng, seen = random.Random(f"heldout:{fam}"), set()
        for _ in range(per * 20):
            ex = families.heldout(fam, rng)
            line = json.dumps(ex, ensure_ascii=False)
            if line not in seen and len(seen) < per:
                seen.add(line)
                lines.append(line)
    (BIG / "heldout.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def measure_draft(per: int) -> dict[str, Any]:
    """Greedy answers of the big model; how often the draft would have chosen the same token after the same text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tok = AutoTokenizer.from_pretrained(BIG)
    big = AutoModelForCausalLM.from_pretrained(BIG, dtype=torch.float32).eval()
    draft = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-chat-draft", dtype=torch.float32).eval()
    same = total = 0
    runs: list[int] = []
    count: dict[str, int] = {}
    for ex in load_heldout():
        if count.get(ex["family"], 0) >= per:
            continue
        count[ex["family"]] = count.get(ex["family"], 0) + 1
        text = tok.apply_chat_template(ex["messages"], tokenize=False, **prompt_kwargs(ex))
        ids = tok(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = big.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest_answer(ex), do_sample=False
        )
        with torch.no_grad():
            guess = draft(out).logits[0, ids.shape[1] - 1 : -1].argmax(-1)
        ok = (guess == out[0, ids.shape[1] :]).tolist()
        same, total = same + sum(ok), total + len(ok)
        i = 0
        while i < len(ok):  # four guesses a step, as a speculative decoder would
            n = 0
            while n < 4 and i + n < len(ok) and ok[i + n]:
                n += 1
            runs.append(n)
            i += n + 1
    return {"tokens": total, "agreement": round(same / total, 4), "accepted_of_4": round(sum(runs) / len(runs), 2)}


def write_card() -> None:
    m = json.loads((BIG / "metrics.json").read_text())
    p1, p2 = m["phases"]
    fams = p2["families"]
    right, n = sum(v["right"] for v in fams.values()), sum(v["n"] for v in fams.values())
    rows = "\n".join(
        f"| {f} | {v['right']} / {v['n']} | {100 * v['right'] / v['n']:.1f} % | {HELD[f]} |" for f, v in fams.items()
    )
    below = (
        ", ".join(f"{f} ({100 * v['right'] / v['n']:.0f} %)" for f, v in fams.items() if v["right"] / v["n"] < 0.98)
        or "none"
    )
    cpu = m.get("transformers_cpu")
    (BIG / "README.md").write_text(
        f"""# tiny-chat

The model that comes with Manta, so that a fresh clone can chat without a download: a Llama of {p1["parameters"] / 1e6:.2f} million parameters
(6 layers of 256, 8 heads and 4 key-value heads of 32, tied embeddings, vocabulary 1,024, context 4,096), stored in bf16 and served in fp32 on a CPU.
It was trained from scratch on conversations that a script made up; no other text went in. It is for trying out and testing Manta. A request that says
nothing of sampling gets what `generation_config.json` asks for: temperature 0.3, top_p 0.9.

## Files

`config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json` and its two companions, `chat_template.jinja` (also inside
`tokenizer_config.json`), `heldout.jsonl` (fixed held-out examples for end-to-end tests; `tools/tiny_chat/evaluate.py` checks the answers),
`metrics.json` (the measurements below). `../tiny-chat-draft` holds a draft model for speculative decoding with the same tokenizer, `../tiny-chat-eagle3` an EAGLE-3 head.

## Chat template

ChatML turns (`<|im_start|>role`, newline, text, `<|im_end|>`, newline). Tools are listed in the system turn inside `<tools>`, a call is
`<tool_call>` newline `{{"name": ..., "arguments": {{...}}}}` newline `</tool_call>`, several calls follow each other, and a result comes back in a `tool` turn inside
`<tool_response>`. `enable_thinking` (default false) ends the prompt with `<think>` and a newline: the answer then begins inside the thought, closes it with
`</think>`, and goes on after an empty line. Thoughts of earlier answers are left out of the history. Asked to "think step by step", the model opens the thought itself.

## Training

| phase | steps | tokens | seconds of training | what |
| --- | --- | --- | --- | --- |
| 1 | {p1["steps"]:,} | {p1["tokens"] / 1e6:,.0f} M ({p1["fresh_tokens"] / 1e6:,.0f} M different) | {p1["train_seconds"]:.0f} | from scratch: `{p1["command"]}` |
| 2 | {p2["steps"]:,} | {p2["tokens"] / 1e6:,.0f} M | 78 | continued with more made-up names, cities, words and tool names, and a few new families: `{p2["command"]}` |

On 2026-11-20, one {p1["gpu"]}, torch {p1["torch"]}; whole runs 528 s and 136 s, of which the rest is start, compilation and measuring. Muon for matrices, AdamW for the
rest, bf16 autocast, rows of 4,096 tokens with attention kept within a conversation, loss on the answers (other tokens count 5 %). Seeds are
fixed, but the schedule follows the clock, so a second run gives a slightly different model. The tokenizer was trained before phase 1 on the data as
it was then (commit `{m["commits"][0]}`); `train.py` reads it and does not make a new one.

## Held-out accuracy

Greedy, bf16 weights computed in fp32, on {n:,} questions that the training part of the generator cannot produce: the parts are disjoint by a hash of the content
named in the last column. The answer must match exactly (JSON and tool calls are compared after parsing). In all {right} / {n} = {100 * right / n:.1f} %.

| family | right | accuracy | held out |
| --- | --- | --- | --- |
{rows}

Below 98 %: {below}. {f"`heldout.jsonl` through transformers {cpu['version']} on a CPU in fp32: {cpu['right']} / {cpu['n']}." if cpu else ""}
Words that are one token of the vocabulary are not held out for letter tasks, since their letters can only be learned from themselves. Some of the
cities in the measured recall questions were capitals that also occur in training; in `heldout.jsonl` all of them are made up.

## Draft

{p1["draft_parameters"] / 1e6:.2f} million parameters (2 layers of 128), taught {p1["draft_seconds"]:.0f} s by the phase-1 model's distribution (which it matched on {100 * p1["draft_agreement_per_token"]:.1f} % of the training tokens).
{f"Against the shipped weights on held-out questions it chooses the same token {100 * m['draft']['agreement']:.1f} % of the time ({m['draft']['tokens']:,} tokens); of four guesses {m['draft']['accepted_of_4']} are accepted on average." if "draft" in m else ""}

## What it is not

It knows only the tables written in `tools/tiny_chat/words.py` and `families.py`, in wordings near those of the generator. It does not know the world, does
not write code and speaks only English. Outside its families it declines, or answers something beside the point with full confidence. Direct addition and subtraction reach
three digits; larger sums and products are worked out digit by digit. Lists of things ("name three fruits") and short commands without
a noun ("sort 5, 2, 9") are weak. Its stories follow one plot. Do not rely on anything it says.
""",
        encoding="utf-8",
    )


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--heldout", type=int, help="examples a family")
    ap.add_argument("--draft", action="store_true")
    args = ap.parse_args()
    if args.heldout:
        write_heldout(args.heldout)
    elif args.draft:
        path: Path = BIG / "metrics.json"
        m = json.loads(path.read_text())
        m["draft"] = measure_draft(4)
        path.write_text(json.dumps(m, indent=1) + "\n")
        write_card()
    else:
        write_card()


if __name__ == "__main__":
    main()
