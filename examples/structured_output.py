"""Structured output through the OpenAI SDK: answers that are a pydantic model, a choice, a pattern.

    make serve
    .venv/bin/python examples/structured_output.py [http://127.0.0.1:8000]

The grammar sees to the form, the model to the contents; the built-in model is small, so the form is what to look at.
"""

from __future__ import annotations

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Sum(BaseModel):
    """What the answer is read into."""

    left: int = Field(ge=0, le=999)
    operator: Literal["+", "-", "*"]
    right: int = Field(ge=0, le=999)


def main(url: str) -> None:
    """One question in each way to constrain the answer."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    ask = {"model": "tiny-chat", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
    answer = client.chat.completions.parse(**ask, response_format=Sum, max_tokens=300)
    print("pydantic:", repr(answer.choices[0].message.parsed))
    for name, outputs in {
        "choice": {"choice": ["more than forty", "less than forty"]},
        "regex": {"regex": r"It is \d{2}\."},
        "grammar": {"grammar": 'start: NUMBER " + " NUMBER " = " NUMBER\nNUMBER: /[1-9][0-9]/'},
    }.items():
        answer = client.chat.completions.create(**ask, extra_body={"structured_outputs": outputs}, max_tokens=100)
        print(f"{name}:", answer.choices[0].message.content)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
