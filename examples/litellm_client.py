"""LiteLLM over the server: a chat, a stream, a tool.

    .venv/bin/python examples/litellm_client.py [URL]

Needs litellm, as `make setup-dev` has it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import fetches a list of prices

import litellm

WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def main(url: str) -> None:
    """Three questions."""
    body: dict[str, Any] = {"model": "openai/tiny-chat", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}

    def ask(question: str, **more: Any) -> Any:
        return litellm.completion(messages=[{"role": "user", "content": question}], max_tokens=96, **body, **more)

    print(ask("What is 17 + 25?").choices[0].message.content)
    pieces = ask("Count from 1 to 20.", stream=True)
    print("".join(piece.choices[0].delta.content or "" for piece in pieces))
    answer = ask("What is the weather in Paris?", tools=[{"type": "function", "function": WEATHER}])
    (call,) = answer.choices[0].message.tool_calls
    print(f"{call.function.name}({call.function.arguments})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
