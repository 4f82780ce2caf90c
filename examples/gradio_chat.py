"""A chat page by Gradio in front of a server.

    .venv/bin/pip install gradio
    make serve
    .venv/bin/python examples/gradio_chat.py [http://127.0.0.1:8000]

Gradio is not among Manta's dependencies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from openai import OpenAI

try:
    import gradio
except ModuleNotFoundError:
    sys.exit("This example needs Gradio, which Manta does not install: pip install gradio")


def main(url: str) -> None:
    """Open the page; every answer is streamed."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def answer(message: str, history: list[dict[str, Any]]) -> Iterator[str]:
        messages: list = [{"role": turn["role"], "content": turn["content"]} for turn in history]
        messages.append({"role": "user", "content": message})
        text = ""
        for chunk in client.chat.completions.create(model="tiny-chat", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
            yield text

    gradio.ChatInterface(answer, title="Manta").launch()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
