"""Decode steps and prefills with low-rank adapters over those without, on random weights.

    python -m benchmarks.lora [--shape llama-8b] [--ranks 16 64] [--dora] [--out results/lora.json]

For each rank one engine with eight slots: a step of the base model alone, of one adapter at batch 1 and 32, of eight
at 32; a prefill of 2,000 tokens; whether base rows keep their bits beside others. Adapters are on all linear layers.
--dora: with magnitudes, of an engine with lora_extras.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from app import LLM, LoRARequest, SamplingParams
from benchmarks.offline import arguments, make_llm, random_prompt, write
from benchmarks.shapes import SHAPES

NUM_ADAPTERS, CONTEXT, STEPS, TRIES = 8, 512, 40, 3


def layer_sizes(shape: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers of a Llama."""
    size, inner = shape["hidden_size"], shape["intermediate_size"]
    head = shape.get("head_dim", size // shape["num_attention_heads"])
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    sizes = {"q_proj": (size, queries), "k_proj": (size, keys), "v_proj": (size, keys), "o_proj": (queries, size)}
    own = {f"self_attn.{name}": pair for name, pair in sizes.items()}
    return {**own, "mlp.gate_proj": (size, inner), "mlp.up_proj": (size, inner), "mlp.down_proj": (inner, size)}


def write_adapter(directory: Path, shape: dict[str, Any], rank: int, dora: bool = False) -> Path:
    """A random adapter as PEFT writes one."""
    directory.mkdir(parents=True)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (inputs, outputs) in layer_sizes(shape).items():
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(rank, inputs, dtype=torch.bfloat16) / inputs**0.5
            tensors[f"{prefix}B.weight"] = torch.randn(outputs, rank, dtype=torch.bfloat16) * 0.02
            if dora:
                tensors[f"{prefix}magnitude_vector"] = torch.rand(outputs, dtype=torch.bfloat16) + 0.5
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_dora": dora}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _twin(first: Path, number: int, rank: int, dora: bool) -> Path:
    """Another adapter of the same matrices, whose products have another factor."""
    directory = first.parent / str(number)
    directory.mkdir()
    (directory / "adapter_model.safetensors").symlink_to(first / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank + number, "use_dora": dora}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


class Bench:
    """One engine and its adapters."""

    def __init__(self, llm: LLM, shape: str, adapters: list[LoRARequest]) -> None:
        self._llm, self._shape, self.adapters = llm, shape, adapters

    def asked(self, batch: int, count: int) -> list[LoRARequest | None]:
        """The first `count` adapters in turn; none: the base model."""
        return [self.adapters[index % count] if count else None for index in range(batch)]

    def seconds(self, length: int, context: int, asked: list[LoRARequest | None]) -> float:
        """The time until each of the requests has `length` tokens."""
        rng = random.Random(length)
        prompts = [{"prompt_token_ids": random_prompt(rng, context, self._shape)} for _ in asked]
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=length, seed=1)
        begin = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False, lora_request=asked if self.adapters else None)
        return time.perf_counter() - begin

    def step_ms(self, batch: int, count: int) -> float:
        """A decode step, in milliseconds."""
        asked = self.asked(batch, count)
        self.seconds(4, CONTEXT, asked)
        found = [self.seconds(2 + STEPS, CONTEXT, asked) - self.seconds(2, CONTEXT, asked) for _ in range(TRIES)]
        return 1e3 * median(found) / STEPS

    def prefill_ms(self, count: int) -> float:
        """A prompt of 2,000 tokens and one token, in milliseconds."""
        asked = self.asked(1, count)
        self.seconds(1, 2000, asked)
        return 1e3 * median(self.seconds(1, 2000, asked) for _ in range(5))

    def bits_differ(self, batch: int) -> str:
        """Says how far the logprobs of base rows are from those of a batch of base rows alone, of as many rows."""
        rng = random.Random(9)
        prompts = [{"prompt_token_ids": random_prompt(rng, 40, self._shape)} for _ in range(batch)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=8, logprobs=1)
        found = []
        for every in (0, 2):
            asked = [self.adapters[i % len(self.adapters)] if every and i % every else None for i in range(batch)]
            results = self._llm.generate(prompts, params, use_tqdm=False, lora_request=asked)
            found.append([[(t.token_ids, t.logprobs) for t in r.outputs[0].logprobs] for r in results[::2]])
        same = sum(a == b for a, b in zip(*found, strict=True))
        return f"{same} of {len(found[0])} base rows have the same bits beside adapters"


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__, "llama-8b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--dora", action="store_true")
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape}
    options = {"max_model_len": 4096, "max_num_seqs": 64, "cuda_graph_sizes": [1, 32], **args.engine}
    with make_llm(args.shape, **options) as llm:
        bench = Bench(llm, args.shape, [])
        figures["off"] = {"1": bench.step_ms(1, 0), "32": bench.step_ms(32, 0), "prefill": bench.prefill_ms(0)}
        print("enable_lora off:", {name: f"{ms:.3f} ms" for name, ms in figures["off"].items()}, flush=True)
    for rank in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            shape = SHAPES[args.shape]
            first = write_adapter(Path(folder) / "0", shape, rank, args.dora)
            paths = [first, *(_twin(first, i, rank, args.dora) for i in range(1, NUM_ADAPTERS))]
            adapters = [LoRARequest(path.name, 1, str(path)) for path in paths]
            lora = {"enable_lora": True, "max_loras": 8, "max_lora_rank": rank, "lora_extras": args.dora}
            with make_llm(args.shape, **lora, **options) as llm:
                figures[str(rank)] = _of_rank(Bench(llm, args.shape, adapters), rank)
        write(args.out, figures)


def _of_rank(bench: Bench, rank: int) -> dict[str, Any]:
    begin = time.perf_counter()
    bench.seconds(1, 16, bench.asked(8, 8))
    row: dict[str, Any] = {"first_use_s": time.perf_counter() - begin}
    for batch, count in ((1, 0), (1, 1), (32, 0), (32, 1), (32, 8)):
        row[f"{batch}x{count}"] = bench.step_ms(batch, count)
    row["prefill0"], row["prefill1"] = bench.prefill_ms(0), bench.prefill_ms(1)
    row["bits"] = [bench.bits_differ(batch) for batch in (2, 32)]
    print(f"rank {rank}: {bench.adapters and len(bench.adapters)} adapters loaded in {row['first_use_s']:.1f} s")
    for batch, count in ((1, 1), (32, 1), (32, 8)):
        base, own = row[f"{batch}x0"], row[f"{batch}x{count}"]
        print(f"  batch {batch:2}, {count} adapters: step {own:.3f} ms over {base:.3f}: {own / base:.3f} x")
    print(f"  prefill of 2,000: {row['prefill1']:.2f} ms over {row['prefill0']:.2f}")
    print("  " + "; ".join(row["bits"]), flush=True)
    return row


if __name__ == "__main__":
    main()
