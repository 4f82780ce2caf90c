# ruff: noqa: E501 (the card)
"""Measures the shipped `tiny-chat-hears` on phrases and speakers that are held out, through a server, and writes its card.

manta serve tiny-chat-hears &
python -m tools.tiny_chat.hears.evaluate [--url http://127.0.0.1:8000] [--held 200] [--report REPORT.json]
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import httpx
import soundfile

from tools.tiny_chat.hears import phrases
from tools.tiny_chat.hears.model import OWN
from tools.tiny_chat.hears.speech import HELD_SPEAKERS, RATE
from tools.tiny_chat.hears.train import held_out, wrong_words

ABOUT = {
    "digits": "one to six digits",
    "colours": "shapes, their colours, how many there are or where they stand",
    "commands": "to lights, doors and the like, and to something that moves",
}


def transcript(url: str, window: Any) -> str:
    """What a server writes down."""
    file = io.BytesIO()
    soundfile.write(file, window, RATE, format="WAV", subtype="PCM_16")
    fields = {"model": OWN.name, "response_format": "json"}
    answer = httpx.post(f"{url}/v1/audio/transcriptions", data=fields, files={"file": file.getvalue()}, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["text"])


def word_errors(url: str, family: str, count: int) -> dict[str, int]:
    """Wrong words and all, of so many phrases."""
    windows, texts = held_out(family, count)
    written = [transcript(url, window) for window in windows.numpy()]
    wrong = sum(map(wrong_words, texts, written))
    return {"wrong": wrong, "words": sum(len(text.split()) for text in texts), "phrases": count}


def card(metrics: dict[str, Any]) -> str:
    """README.md of the model."""
    run, families = metrics["training"], metrics["families"]
    rows = [
        f"| {name} | {found['phrases']} | {found['words']} | {100 * found['wrong'] / found['words']:.1f} % | {ABOUT[name]} |"
        for name, found in families.items()
    ]
    wrong, words = (sum(found[key] for found in families.values()) for key in ("wrong", "words"))
    table = "\n".join(rows)
    return f"""# tiny-chat-hears

A Whisper of a million numbers (3 layers of 128 that hear, 2 that write; windows of 4 seconds) for trying out and testing transcriptions in Manta:
`manta serve tiny-chat-hears`, and OpenAI's clients or the chat page's Record. It writes English words in small letters, and tells times, but not those
of words.

## Training

{run["date"]}, {run["device"]}, torch {run["torch"]}: `python -m tools.tiny_chat.hears.train --out DIR`, {run["steps"]:,} steps of {run["batch"]} in
{run["seconds"]:.0f} s. All speech was made by espeak-ng while it trained, {run["phrases_spoken"]:,} phrases: five kinds of English, 13 speakers, any speed and pitch, over
some noise. No recording of anybody is in it.

## Held-out word errors

Greedy, through a server on a CPU in fp32 (`python -m tools.tiny_chat.hears.evaluate`), of phrases that training cannot say (one in sixteen, by a hash) by
two speakers that it does not know ({" and ".join(HELD_SPEAKERS)} of espeak-ng), over the same noise. In all {100 * wrong / words:.1f} % of {words} words.

| family | phrases | words | word errors | what is said |
| --- | --- | --- | --- | --- |
{table}

## What it is not

It knows some 75 words, as espeak-ng says them, in phrases like those of `phrases.py`. Of people's voices and of all other words it makes some of
these, with full confidence.
"""


def main() -> None:
    """Measure, write metrics.json and the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--held", type=int, default=200, help="Held-out phrases of each family.")
    parser.add_argument("--report", type=Path, help="The training's; else that of the metrics.")
    args = parser.parse_args()
    file = OWN / "metrics.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    metrics = {"training": before.get("training") if args.report is None else json.loads(args.report.read_text())}
    metrics["families"] = {family: word_errors(args.url, family, args.held) for family in phrases.FAMILIES}
    file.write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    (OWN / "README.md").write_text(card(metrics), encoding="utf-8")
    print(json.dumps(metrics["families"]))


if __name__ == "__main__":
    main()
