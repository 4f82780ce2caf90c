"""How sure the model is, through the OpenAI SDK.

    make serve
    .venv/bin/python examples/openai_logprobs.py [http://127.0.0.1:8000]

Shows the most likely tokens at every place of an answer, and the scores of two given texts.
"""

from __future__ import annotations

import math
import sys

from openai import OpenAI


def main(url: str) -> None:
    """The three most likely tokens at every place of an answer; then the score of two texts."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "What is 8 + 6?"}],
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    for place in answer.choices[0].logprobs.content:
        others = ", ".join(f"{other.token!r} {math.exp(other.logprob):.1%}" for other in place.top_logprobs)
        print(f"{place.token!r}: {others}")
    for text in ("8 + 6 = 14.", "8 + 6 = 15."):
        scored = client.completions.create(model="tiny-chat", prompt=text, max_tokens=0, echo=True, logprobs=0)
        logprobs = scored.choices[0].logprobs.token_logprobs
        print(f"{text} {sum(logprob for logprob in logprobs if logprob is not None):.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
