"""Pictures through the OpenAI SDK: three that are drawn here, or a file of yours, and the second question about one.

    make serve
    .venv/bin/python examples/openai_picture.py [http://127.0.0.1:8000 [PICTURE]]

The second question costs no second look: the picture's tokens come out of the prefix cache.
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI
from PIL import Image, ImageDraw, ImageFont

SIDE = 224


def shapes() -> Image.Image:
    """Three blue circles and a red square."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    for x, y in ((50, 55), (165, 60), (60, 165)):
        pen.ellipse((x - 28, y - 28, x + 28, y + 28), fill="blue")
    pen.rectangle((140, 140, 190, 190), fill="red")
    return image


def number() -> Image.Image:
    """The number 407."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    ImageDraw.Draw(image).text((30, 60), "407", fill="black", font=ImageFont.load_default(90.0))
    return image


def chart() -> Image.Image:
    """A bar chart: red 3, green 7, blue 5, with a line for each unit."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    for value in range(11):
        pen.line((15, 208 - 19 * value, 212, 208 - 19 * value), fill="silver" if value else "black", width=2)
    for place, (color, value) in enumerate((("red", 3), ("green", 7), ("blue", 5))):
        pen.rectangle((30 + 62 * place, 208 - 19 * value, 72 + 62 * place, 208), fill=color)
    return image


def url_of(image: Image.Image) -> str:
    """A picture as a data URL."""
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def main(url: str, path: str | None = None) -> None:
    """Ask two questions about each picture."""
    asked = {
        "shapes": (shapes(), "How many circles are there?", "What color is the square?"),
        "number": (number(), "What number is this?", "Describe the picture."),
        "chart": (chart(), "Which bar is the tallest?", "How high is the red bar?"),
    }
    if path is not None:
        asked = {Path(path).name: (Image.open(path), "What is in the picture?", "How many shapes are there?")}
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    for name, (image, *questions) in asked.items():
        messages: list[Any] = []
        for ask in questions:
            parts: list[dict[str, Any]] = [{"type": "text", "text": ask}]
            if not messages:
                parts.append({"type": "image_url", "image_url": {"url": url_of(image)}})
            messages.append({"role": "user", "content": parts})
            answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
            text = answer.choices[0].message.content
            print(f"{name}: {ask} {text}")
            messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["http://127.0.0.1:8000"]))
