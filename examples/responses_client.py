"""The Responses API through the OpenAI SDK: a conversation that the server keeps, and a stream of typed events.

    make serve
    .venv/bin/python examples/responses_client.py [http://127.0.0.1:8000]

Each turn names the one before it and sends only what is new.
"""

from __future__ import annotations

import sys

from openai import OpenAI

MODEL = "tiny-chat"


def main(url: str) -> None:
    """Two turns, a stream, and the end of what was kept."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    first = client.responses.create(model=MODEL, input="My name is Ada.", temperature=0, max_output_tokens=60)
    print("1:", first.output_text)
    second = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0, max_output_tokens=60
    )
    print("2:", second.output_text)

    with client.responses.stream(model=MODEL, input="Count from 1 to 20.", temperature=0, store=False) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
        usage = stream.get_final_response().usage
    print()
    assert usage is not None
    print(f"{usage.input_tokens} tokens in, {usage.output_tokens} out")

    for kept in (second, first):  # they would be kept until the server needs the room
        client.responses.delete(kept.id)
    print("forgotten")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
