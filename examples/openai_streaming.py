"""A streamed answer through the OpenAI SDK, with its times.

    make serve
    .venv/bin/python examples/openai_streaming.py [http://127.0.0.1:8000]

Time to first token includes the connection; the rate is that of the tokens after it.
"""

from __future__ import annotations

import sys
import time

from openai import OpenAI


def main(url: str) -> None:
    """Print the text as it comes, then time to first token and tokens per second."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    begin = time.perf_counter()
    first = last = begin
    num_tokens = 0
    stream = client.chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "user", "content": "Count from 1 to 20."}],
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage:  # the last chunk has no choice, only this
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                last = time.perf_counter()
                first = last if first == begin else first
                print(choice.delta.content, end="", flush=True)
    print(f"\n{num_tokens} tokens, first after {1e3 * (first - begin):.0f} ms, "
          f"then {(num_tokens - 1) / max(last - first, 1e-9):.0f} tokens/s")  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
