"""How often rounding changes a greedy token, and how near the tie was where it did.

    python -m benchmarks.near_ties [--dtype bfloat16] [--requests 64] [--out results/near_ties.json]

The built-in model. Requests generate greedily alone, then all together, and both are held against transformers in
fp32. Of the requests that differ, only the first token that does counts, as what follows answers other text: `gap` is
how much likelier (in logprob, by transformers) the one token was than the other there. In fp32 nothing may
differ between alone and together: exit 1.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from app import LLM, SamplingParams
from benchmarks.offline import write
from benchmarks.serve_process import ROOT

MODEL = ROOT / "app/assets/tiny-chat"
TOKENS = 32


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of prompts that are computed together."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


@torch.inference_mode()
def gaps(judge: Any, prompts: list[list[int]], left: list[list[int]], right: list[list[int]]) -> list[float]:
    """The difference in logprob at the first token that differs, for each request with one."""
    found = []
    for prompt, a, b in zip(prompts, left, right, strict=True):
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if place is not None:
            logits = judge(torch.tensor([prompt + a[:place]])).logits[0, -1].float()
            found.append(float((logits[a[place]] - logits[b[place]]).abs()))
    return found


def main() -> None:
    """Compare, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine options, as JSON")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    rng = random.Random(0)
    judge = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    judge.generation_config.eos_token_id = None  # as `ignore_eos`
    with LLM("tiny-chat", dtype=args.dtype, enable_prefix_caching=False, max_num_seqs=256, **args.engine) as llm:
        text = llm.tokenizer.encode((ROOT / "LICENSE").read_text())
        starts = [rng.randrange(len(text) - 200) for _ in range(args.requests)]
        prompts = [text[start : start + rng.randint(5, 150)] for start in starts]
        alone = [tokens for prompt in prompts for tokens in greedy(llm, [prompt])]
        together = greedy(llm, prompts)
    with torch.inference_mode():
        truth = [
            judge.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)[0].tolist()[
                len(prompt) :
            ]
            for prompt in prompts
        ]
    figures: dict[str, Any] = {"dtype": args.dtype, "requests": args.requests, "tokens": TOKENS}
    for name, left, right in (("alone, together", alone, together), ("transformers, together", truth, together)):
        found = sorted(gaps(judge, prompts, left, right))
        figures[name] = {"differ": len(found), "gap_median": found[len(found) // 2] if found else 0.0}
        figures[name]["gap_most"] = found[-1] if found else 0.0
        print(name, figures[name], flush=True)
    write(args.out, figures)
    raise SystemExit(int(args.dtype == "float32" and alone != together))


if __name__ == "__main__":
    main()
