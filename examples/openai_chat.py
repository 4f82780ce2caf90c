"""A conversation through the OpenAI SDK, and what the server counts of it.

    make serve
    .venv/bin/python examples/openai_chat.py [http://127.0.0.1:8000]

The second turn repeats the first, which the prefix cache then need not compute again.
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str) -> None:
    """Two turns: the second needs what the first one said."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": "My name is Tarek. What is 12 + 30?"}]
    for question in ("What is 40 + 2?", None):
        answer = client.chat.completions.create(model="tiny-chat", messages=messages, temperature=0, max_tokens=64)
        text = answer.choices[0].message.content or ""
        print(f"> {messages[-1]['content']}\n{text}")
        if question is not None:
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    print(f"{usage.prompt_tokens} prompt tokens ({cached} from the cache), {usage.completion_tokens} output tokens")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
