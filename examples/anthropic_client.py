"""The Anthropic SDK: an answer, a stream, and a tool the model calls.

    make serve
    .venv/bin/python examples/anthropic_client.py [http://127.0.0.1:8000]

The server speaks both dialects at one address; the Anthropic SDK wants it without `/v1`.
"""

from __future__ import annotations

import json
import sys

from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam

MODEL = "tiny-chat"
GREEDY = {"temperature": 0}  # recent versions of the SDK have no parameter for it
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def main(url: str) -> None:
    """One question in each way."""
    client = Anthropic(base_url=url, api_key="none")
    ask: MessageParam = {"role": "user", "content": "What is 17 + 25?"}
    answer = client.messages.create(model=MODEL, max_tokens=100, extra_body=GREEDY, messages=[ask])
    print("".join(block.text for block in answer.content if block.type == "text"), answer.usage.output_tokens, "tokens")

    ask = {"role": "user", "content": "Count from 1 to 20."}
    with client.messages.stream(model=MODEL, max_tokens=100, extra_body=GREEDY, messages=[ask]) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    print()
    call_a_tool(client)


def call_a_tool(client: Anthropic) -> None:
    """The model asks for a call, we make it, the model reads the result."""
    messages: list[MessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.messages.create(model=MODEL, max_tokens=200, extra_body=GREEDY, tools=[WEATHER], messages=messages)
    call = next(block for block in answer.content if block.type == "tool_use")
    print(f"{call.name}({call.input})")
    result = json.dumps({"temperature": 21, "condition": "sunny"})  # a real tool would ask somebody
    messages.append({"role": "assistant", "content": answer.content})
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": result}]})
    answer = client.messages.create(model=MODEL, max_tokens=100, extra_body=GREEDY, tools=[WEATHER], messages=messages)
    print("".join(block.text for block in answer.content if block.type == "text"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
