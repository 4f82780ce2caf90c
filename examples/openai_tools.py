"""Tools through the OpenAI SDK: the model asks for a call, we make it, the model reads the result.

    make serve
    .venv/bin/python examples/openai_tools.py [http://127.0.0.1:8000]

The built-in model writes its calls in the Hermes form; the server turns them into `tool_calls`.
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def get_weather(city: str) -> dict[str, object]:
    """A real tool would ask somebody."""
    return {"city": city, "temperature": 21, "condition": "sunny"}


def main(url: str) -> None:
    """One question that needs the tool."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat.completions.create(model="tiny-chat", messages=messages, tools=TOOLS, temperature=0)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        result = get_weather(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    answer = client.chat.completions.create(model="tiny-chat", messages=messages, tools=TOOLS, temperature=0)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
