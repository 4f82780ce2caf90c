"""`manta quantize`: a checkpoint of plain weights as a quantized one, with a report of what that costs."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

from app.cli.command import Command
from app.cli.numbers import at_least
from app.errors import ConfigError
from app.quantize.settings import FORMS, MOST_SAMPLES, MOST_TOKENS, QuantizeSettings

HELP = "write a quantized checkpoint, and what it costs"
DESCRIPTION = """Writes OUTPUT, a checkpoint in compressed-tensors form that Manta, vLLM and transformers load, from a
model directory with plain weights (bf16 and the like). The output head, embeddings, norms and gates of experts stay as
they are. Without --awq and --kv nothing need be calibrated: weights are rounded to nearest, as `--quantization` does
while loading."""
EPILOG = """Forms (--to): fp8: e4m3, a scale for each output, activations in fp8 by token; fp8_block: the same with a
scale for 128 x 128 numbers; int8: W8A8; w4: 4 bits in groups of 128 inputs, activations as they are. Begin with `manta
quantize MODEL OUTPUT --to int8`, read the table it prints (or OUTPUT/quantization_report.json), and add --awq where w4
costs too much. Then: manta serve OUTPUT."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """From what, to what, with which texts."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("model", metavar="MODEL", help="a model directory, a built-in model, or one of a hub")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="a new directory")
    forms = parser.add_argument_group("form")
    forms.add_argument("--to", choices=FORMS, metavar="|".join(FORMS), help="how linear layers are stored")
    forms.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        default=128,
        metavar="32|64|128",
        help="inputs that share a scale in w4 (default: %(default)s)",
    )
    forms.add_argument(
        "--awq", action="store_true", help="for w4: search a scale for each input, with the calibration texts"
    )
    forms.add_argument(
        "--kv",
        choices=("fp8",),
        metavar="fp8",
        help="calibrate k_scale and v_scale for --kv-cache-dtype fp8; without --to, nothing but these is added",
    )
    forms.add_argument(
        "--kv-scales",
        choices=("tensor", "head"),
        metavar="tensor|head",
        help="for --kv: what has a scale: a layer's keys and values, or each of its KV heads (default: tensor)",
    )
    _add_texts(parser)
    parser.add_argument("--device", default="auto", help="auto: a visible GPU, else cpu")


def _add_texts(parser: argparse.ArgumentParser) -> None:
    texts = parser.add_argument_group("texts, every fourth of which is held out for the report")
    texts.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="jsonl with `text` or `messages` in each line, or plain text; give text like your traffic (default: 504 "
        "short conversations that come with Manta)",
    )
    texts.add_argument(
        "--samples",
        type=at_least(1, MOST_SAMPLES),
        default=128,
        metavar="N",
        help="most texts to calibrate with (default: 128)",
    )
    texts.add_argument(
        "--length", type=at_least(2, MOST_TOKENS), default=512, metavar="N", help="most tokens of each (default: 512)"
    )
    texts.add_argument(
        "--report", action=argparse.BooleanOptionalAction, default=True, help="compare both models (default: yes)"
    )
    texts.add_argument(
        "--questions",
        type=at_least(0),
        default=84,
        metavar="N",
        help="most questions of the model's own heldout.jsonl, which the built-in one has, that are answered for the "
        "report (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Write and report."""
    logging.getLogger("app").setLevel(logging.WARNING)
    if args.kv_scales and not args.kv:
        raise ConfigError("--kv-scales: for --kv fp8 only: add it")
    settings = QuantizeSettings(
        model=args.model,
        output=args.output,
        form=args.to,
        group_size=args.group_size,
        awq=args.awq,
        kv=(args.kv_scales or "tensor") if args.kv else None,
        calibration=args.calibration,
        samples=args.samples,
        length=args.length,
        device=args.device,
        report=args.report,
        questions=args.questions,
    )
    from app.quantize.quantize import quantize

    began = time.monotonic()
    report = quantize(settings, lambda line: print(line, flush=True))
    for line in [] if report is None else report.table():
        print(line)
    option = " --kv-cache-dtype fp8" if args.kv else ""
    print(f"{time.monotonic() - began:.0f} s; serve it with: manta serve {args.output}{option}")
    return 0


COMMAND = Command(HELP, add_arguments, run)
