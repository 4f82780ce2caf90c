"""The same checkpoints in vLLM and in Manta: greedy answers, and logprobs of the prompts' tokens.

    python -m benchmarks.quantized_accuracy --keep CHECKPOINTS     (by `manta quantize`, of the built-in model)
    python -m benchmarks.quantized_logprobs vllm CHECKPOINTS/* --out results/vllm        (where vLLM is installed)
    python -m benchmarks.quantized_logprobs manta CHECKPOINTS/* --out results/manta [--device cpu] [--dtype float32]
    python -m benchmarks.quantized_logprobs compare results/vllm results/manta

Prompts are every fourth held-out question of the built-in model, up to 1,900 tokens. A directory whose name has "kv" is
run with a cache in fp8. `compare` prints the mean and the largest difference of a token's logprob; in float32 Manta
computes what is stored without rounding anything more.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from app.checkpoints.model_info import ASSETS
from app.quantize.questions import read_questions
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer

MODEL = ASSETS / "tiny-chat"
NUM_TOKENS, MOST_TOKENS, CONTEXT = 32, 1900, 2048


def prompts(most: int) -> list[list[int]]:
    """Token ids of the questions."""
    tokenizer = Tokenizer.from_directory(MODEL)
    template = ChatTemplate.from_directory(MODEL, tokenizer)
    rendered = (
        template.render(
            question["messages"],
            tools=question.get("tools"),
            chat_template_kwargs=question.get("chat_template_kwargs") or {},
        )
        for question in read_questions(MODEL)[::4]
    )
    ids = (tokenizer.encode(text, add_special_tokens=False) for text in rendered)
    return [one for one in ids if len(one) <= MOST_TOKENS][:most]


def by_vllm(directory: Path, ids: list[list[int]], kv: str, args: argparse.Namespace) -> dict[str, Any]:
    """Answers and logprobs."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        str(directory), dtype=args.dtype, kv_cache_dtype=kv, max_model_len=CONTEXT, kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.1, enforce_eager=True, enable_prefix_caching=False, max_num_seqs=128,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
    logprobs = [[next(iter(e.values())).logprob for e in output.prompt_logprobs if e] for output in outputs]
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "logprobs": logprobs}


def by_manta(directory: Path, ids: list[list[int]], kv: str, args: argparse.Namespace) -> dict[str, Any]:
    """The same."""
    from app import LLM, SamplingParams

    llm = LLM(
        str(directory), dtype=args.dtype, kv_cache_dtype=kv, max_model_len=CONTEXT, device=args.device,
        gpu_memory_utilization=0.15, enable_prefix_caching=False,
    )  # fmt: skip
    outputs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, prompt_logprobs=0), use_tqdm=False)
    llm.shutdown()
    logprobs = [[e.logprobs[0] for e in output.prompt_logprobs or () if e is not None] for output in outputs]
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "logprobs": logprobs}


def compare(first: Path, second: Path) -> None:
    """A table of the checkpoints that both have."""
    print(
        "| checkpoint | same answers | logprob of a token: mean difference | largest | places |\n|---|---|---|---|---|"
    )
    for file in sorted(first.glob("*.json")):
        if (second / file.name).is_file():
            a, b = (json.loads((folder / file.name).read_text()) for folder in (first, second))
            pairs = [
                pair for rows in zip(a["logprobs"], b["logprobs"], strict=False) for pair in zip(*rows, strict=True)
            ]
            differences = [abs(x - y) for x, y in pairs]
            answers = list(zip(a["tokens"], b["tokens"], strict=False))
            cells = [file.stem, f"{sum(x == y for x, y in answers)} of {len(answers)}"]
            mean = sum(differences) / len(differences)
            print("| " + " | ".join([*cells, f"{mean:.4f}", f"{max(differences):.3f}", str(len(differences))]) + " |")


def main() -> None:
    """Answer and write JSON files, or print a table of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["vllm", "manta", "compare"])
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("results/logprobs"))
    parser.add_argument("--device", help="of Manta")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=1000, help="at most so many")
    args = parser.parse_args()
    if args.what == "compare":
        compare(*args.directories)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    ids = prompts(args.prompts)
    for directory in args.directories:
        kv = "fp8" if "kv" in directory.name else "auto"
        found = (by_vllm if args.what == "vllm" else by_manta)(directory, ids, kv, args)
        (args.out / f"{directory.name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
