"""Writes the model card of `tiny-chat-eagle3` from how it was trained and how often its drafts are right.

python -m benchmarks.built_in_drafts --families --per-family 14 --drafters tiny-chat-eagle3 --out results/drafts.json
python -m tools.tiny_chat.eagle.card results/drafts.json --per-family 14
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from app.checkpoints.model_info import ASSETS
from tools.tiny_chat.eagle.head import KNOWN, READS, UNROLLED

DIRECTORY = ASSETS / "tiny-chat-eagle3"


def cell(found: list[dict[str, int]]) -> str:
    """Tokens a step, and the share of drafts that were right."""
    drafts, made, right = (sum(one[key] for one in found) for key in ("drafts", "made", "right"))
    return f"{1 + right / max(1, drafts):.2f} ({right / max(1, made):.0%})"


def card(figures: dict[str, Any], training: dict[str, Any], per_family: int) -> str:
    """The page, of figures over so many questions of each family."""
    names = list(figures)
    rows = [(family, [cell([figures[name][family]]) for name in names]) for family in figures[names[0]]]
    rows.append(("all", [cell(list(figures[name].values())) for name in names]))
    table = "\n".join(f"| {family} | {' | '.join(cells)} |" for family, cells in rows)
    size = (DIRECTORY / "model.safetensors").stat().st_size
    return f"""# tiny-chat-eagle3

An EAGLE-3 head (Li et al., 2025) that drafts for `tiny-chat`: one layer of 128 over the next token's embedding and what
layers {READS[0]} and {READS[1]} of the target read, {KNOWN} of its 1,024 tokens, {size:,} bytes in bf16
(`--speculative-config '{{"method": "eagle3", "model": "tiny-chat-eagle3"}}'`). Drafts change no token of an answer.

Trained by `tools/tiny_chat/eagle/train.py` on one H200 in two runs of {training["arguments"]["seconds"]} seconds and
fewer (`training.json` is of the last one), on conversations of tiny-chat's families and on what it says itself behind
other openings, {UNROLLED} passes unrolled. No held-out question went in.

## Held-out acceptance

Greedy answers, seven drafts a step, held-out questions of each family: {per_family}. Tokens a step (at most 8), and how
many drafts were right (`python -m benchmarks.built_in_drafts --families --drafters tiny-chat-eagle3`). By training's
own measure, over places instead of steps and {training["arguments"]["held"]} such questions of each family:
{training["tokens_per_step"]:.2f} tokens a step.

| family | {" | ".join(names)} |
|---|{"---|" * len(names)}
{table}
"""


def main() -> None:
    """Read, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--per-family", type=int, required=True, help="questions that the figures are of")
    args = parser.parse_args()
    training = json.loads((DIRECTORY / "training.json").read_text())
    (DIRECTORY / "README.md").write_text(card(json.loads(args.figures.read_text()), training, args.per_family))


if __name__ == "__main__":
    main()
