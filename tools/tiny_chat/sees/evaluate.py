# ruff: noqa: E501 (the card)
"""Measures the shipped `tiny-chat-sees` on held-out scenes, through Manta, and writes its card.

python -m tools.tiny_chat.sees.evaluate [--per-family 100] [--report REPORT.json]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from app import LLM, SamplingParams
from tools.tiny_chat.sees import drawing, scenes
from tools.tiny_chat.sees.rows import ASSETS
from tools.tiny_chat.words import held

OWN = ASSETS / "tiny-chat-sees"
GREEDY = SamplingParams(temperature=0, max_tokens=64)


def questions(family: str, per: int, seed: str) -> Iterator[tuple[Image.Image, str, str]]:
    """Held-out pictures, what is asked of them, and the right answers."""
    rng = random.Random(f"{seed}:{family}")
    for _ in range(per):
        scene, (ask, answer) = scenes.heldout(rng, family)
        yield drawing.draw(rng, scene), ask, answer


def said(picture: Image.Image, ask: str) -> list[dict[str, Any]]:
    """A conversation that shows a picture and asks about it."""
    return [{"role": "user", "content": [{"image_pil": picture}, {"type": "text", "text": ask}]}]


def is_right(got: str, answer: str) -> bool:
    """To the letter, but that a description may name what there is in any order: pictures do not tell one."""
    return got == answer or (":" not in answer and _named(got) == _named(answer))


def _named(text: str) -> list[str]:
    return sorted((text[:1].lower() + text[1:]).removesuffix(".").replace(" and ", ", ").split(", "))


def right_of(llm: LLM, family: str, per: int, seed: str) -> int:
    """How many greedy answers are right."""
    asked = list(questions(family, per, seed))
    outputs = llm.chat([said(picture, ask) for picture, ask, _ in asked], GREEDY, use_tqdm=False)
    return sum(is_right(out.outputs[0].text, answer) for out, (_, _, answer) in zip(outputs, asked, strict=True))


HELD = {
    "count": "one shape of up to three kinds, up to nine things in all; absent ones, too",
    "count_all": "all things, up to nine",
    "color": "the color of the things of one shape",
    "shape": "the only thing's shape or color",
    "is_there": "yes or no",
    "place": "which of two is left, right, above or below",
    "number": "one to four digits",
    "bars": "how many bars, two to five",
    "tallest": "the tallest or the shortest bar",
    "height": "a bar's height against the lines, one to nine",
    "describe": "all of the picture in a sentence, heights of all bars, too",
}


def single_shapes() -> str:
    """The shapes that no picture of training shows alone."""
    alone = [(shape, color) for shape in scenes.SHAPES for color in scenes.COLORS]
    found = [f"the {color} {shape}" for shape, color in alone if held(scenes.Scene("shapes", ((shape, color),)).key)]
    return " and ".join(found)


def card(metrics: dict[str, Any]) -> str:
    """README.md of the model."""
    families, runs = metrics["families"], metrics["training"]
    rows = "\n".join(
        f"| {name} | {n} / {metrics['per_family']} | {100 * n / metrics['per_family']:.1f} % | {HELD[name]} |"
        for name, n in families.items()
    )
    trained = "\n".join(
        f"| {i} | {run['steps']:,} | {run['seconds']:.0f} | {run['pictures_drawn']:,} |"
        for i, run in enumerate(runs, 1)
    )
    share = sum(families.values()) / (metrics["per_family"] * len(families))
    return f"""# tiny-chat-sees

`tiny-chat` with eyes: a LLaVA whose language model is [tiny-chat](../tiny-chat/README.md) bit for bit, and in front of it a
CLIP tower of 0.6 million parameters (4 layers of 128, pictures of 96 x 96 in 64 patches) and a projector of 0.1 million. `front.safetensors`
(bf16) holds these two alone; the text's weights are not stored twice: on first use the whole checkpoint, a plain
`LlavaForConditionalGeneration`, is put together in the user's cache (`app/checkpoints/built_in.py`). A request without a picture
gets what tiny-chat answers, bit for bit. It is for trying out and testing pictures in Manta.

## Pictures

A picture of any size is resized to 96 x 96 and takes 64 tokens at the head of its message. Its placeholder `<image>` has the row of the
vocabulary that byte 0xFF had, which no text holds, so neither the vocabulary nor the logits of texts differ from tiny-chat's.

## Training

On {metrics["date"]}, {runs[0]["device"]}, torch {runs[0]["torch"]}: `python -m tools.tiny_chat.sees.train --out DIR`, then again with `--init`
of what the run before had left. Every picture is drawn by a script (`tools/tiny_chat/sees/`), with one to four questions. tiny-chat's weights were left
as they are; gradients went through them. Some rows also hold a question of tiny-chat's own families, so that talk beside a picture stays
what it was.

| run | steps of {runs[0]["batch"]:,} rows | seconds | pictures drawn |
| --- | --- | --- | --- |
{trained}

## Held-out accuracy

Greedy, through Manta on a CPU in fp32 (`python -m tools.tiny_chat.sees.evaluate`), on pictures of scenes that training cannot produce (one scene
in sixteen, by a hash of its content; of 40 shapes alone that is {single_shapes()}). The answer must match to the letter, but that a description may name
its shapes in any order. In all {100 * share:.1f} %.

| family | right | accuracy | what is asked |
| --- | --- | --- | --- |
{rows}

## What it is not

It knows flat shapes (circle, square, triangle, star, diamond) in eight colors on a light ground, printed numbers in one typeface, and bar charts with a line
for each unit, drawn by Pillow; in wordings near those of `scenes.py`. It was taught one picture a conversation. Photographs, other charts and handwriting it
answers with full confidence, and wrongly.
"""


def main() -> None:
    """Measure, and write metrics.json and the card."""
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--per-family", type=int, default=100)
    ap.add_argument(
        "--reports", type=Path, nargs="*", help="report.json of each run of the training; without, accuracy is printed"
    )
    ap.add_argument("--date", default="")
    args = ap.parse_args()
    with LLM("tiny-chat-sees", device="cpu", num_threads=1, max_model_len=512) as llm:
        found = {name: right_of(llm, name, args.per_family, "card") for name in scenes.FAMILIES}
    for name, n in found.items():
        print(f"{name:10} {n} / {args.per_family}")
    if not args.reports:
        return
    training = [json.loads(report.read_text(encoding="utf-8")) for report in args.reports]
    metrics = {"date": args.date, "per_family": args.per_family, "families": found, "training": training}
    (OWN / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    (OWN / "README.md").write_text(card(metrics), encoding="utf-8")


if __name__ == "__main__":
    main()
