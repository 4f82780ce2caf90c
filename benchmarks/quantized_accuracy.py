"""What each form of quantization costs the built-in model: right answers, perplexity and logits beside bf16's.

    python -m benchmarks.quantized_accuracy [--questions 504] [--device cpu] [--keep DIR] [--out results/accuracy.json]

Rows: plain weights; each form that is made while loading; each checkpoint that `manta quantize` writes, of which
`--keep` keeps a copy. All answer the same held-out questions greedily, in one batch; perplexity, KL divergence and the
share of places with the same most likely token are over the texts that a calibration holds out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app import LLM
from app.checkpoints.model_info import ASSETS
from app.quantize.answers import right_answers
from app.quantize.layerwise import FinalStates, LayerwiseModel
from app.quantize.quantize import quantize
from app.quantize.questions import read_questions
from app.quantize.report import measure
from app.quantize.settings import FORMS, QuantizeSettings
from app.quantize.texts import Texts
from app.quantize.token_batch import TokenBatch
from benchmarks.offline import write

MODEL = ASSETS / "tiny-chat"
CHECKPOINTS: dict[str, dict[str, Any]] = {
    **{form: {"form": form} for form in FORMS},
    "w4 by 32": {"form": "w4", "group_size": 32},
    "w4 awq": {"form": "w4", "awq": True},
    "fp8, kv fp8": {"form": "fp8", "kv": "tensor"},
    "kv fp8 by head": {"form": None, "kv": "head"},
}


@dataclass(slots=True, frozen=True)
class Variant:
    """One row: a directory and how it is loaded."""

    name: str
    directory: Path
    quantization: str | None = None
    kv_cache_dtype: str = "auto"


def variants(folder: Path, device: str) -> Iterator[Variant]:
    """All rows; checkpoints are written into `folder` when their turn comes."""
    yield Variant("plain", MODEL)
    for form in FORMS:
        yield Variant(f"online {form}", MODEL, form)
    for name, options in CHECKPOINTS.items():
        output = folder / name.replace(",", "").replace(" ", "-")
        if not output.exists():
            quantize(QuantizeSettings(str(MODEL), output, **options, report=False, device=device))
        yield Variant(f"checkpoint {name}", output, kv_cache_dtype="fp8" if options.get("kv") else "auto")
    yield Variant("online kv fp8", MODEL, kv_cache_dtype="fp8")


def row_of(
    variant: Variant, batches: list[TokenBatch], plain: FinalStates, questions: list[dict[str, Any]], device: str
) -> dict[str, Any]:
    """The figures of one variant."""
    model = LayerwiseModel(str(variant.directory), device, variant.kv_cache_dtype, variant.quantization)
    report = asdict(measure(batches, plain, model.run(batches)))
    options = {"quantization": variant.quantization, "kv_cache_dtype": variant.kv_cache_dtype, "device": device}
    with LLM(str(variant.directory), **options) as llm:
        right = sum(right_answers(llm, questions))
    return {
        "right": right,
        "questions": len(questions),
        "perplexity": report["perplexity"]["quantized"],
        **report["logits"],
        "tensor_bytes": sum(file.stat().st_size for file in variant.directory.glob("*.safetensors")),
    }


def main() -> None:
    """Measure, print each row as it comes, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=504)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", help="rows whose names hold this, beside the plain one")
    parser.add_argument("--keep", type=Path, help="a folder for the checkpoints")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    every = read_questions(MODEL)
    questions = [every[number * len(every) // args.questions] for number in range(args.questions)]
    batches = TokenBatch.split(Texts.read(None, MODEL, 128, 512, 1024).held_out)
    plain = LayerwiseModel(str(MODEL), args.device).run(batches)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for variant in variants(args.keep or Path(temporary), args.device):
            if args.only is not None and variant.name != "plain" and args.only not in variant.name:
                continue
            rows[variant.name] = row = row_of(variant, batches, plain, questions, args.device)
            figures = f"{row['right']} of {row['questions']}, perplexity {row['perplexity']:.4f}"
            figures += f", KL {row['kl_divergence']:.5f}, same token {row['same_top_token']:.2%}"
            print(f"{variant.name:<28} {figures}, {row['tensor_bytes'] / 1e6:.2f} MB", flush=True)
            write(args.out, {"device": args.device, "rows": rows})


if __name__ == "__main__":
    main()
