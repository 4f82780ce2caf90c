"""Writes the model card of `tiny-chat-eagle3` from how it was trained and how often its drafts are right.

python -m benchmarks.built_in_drafts --families --out results/drafts.json
python -m tools.tiny_chat.eagle.card results/drafts.json
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


def card(figures: dict[str, Any], training: dict[str, Any]) -> str:
    """The page."""
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

Greedy answers to held-out questions, seven drafts a step: tokens a step (at most 8), and how many drafts were right
(`python -m benchmarks.built_in_drafts --families`). By training's own measure, over places instead of steps and
{training["arguments"]["held"]} held-out questions of each family: {training["tokens_per_step"]:.2f} tokens a step.

| family | {" | ".join(names)} |
|---|{"---|" * len(names)}
{table}
"""


def main() -> None:
    """Read, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    args = parser.parse_args()
    training = json.loads((DIRECTORY / "training.json").read_text())
    (DIRECTORY / "README.md").write_text(card(json.loads(args.figures.read_text()), training))


if __name__ == "__main__":
    main()
