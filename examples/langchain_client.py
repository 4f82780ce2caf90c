"""LangChain over the server: a chat, a stream, a tool.

    .venv/bin/python examples/langchain_client.py [URL]

Needs langchain-openai, as `make setup-dev` has it.
"""

from __future__ import annotations

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


@tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"21 degrees and sunny in {city}"


def main(url: str) -> None:
    """Three questions."""
    llm = ChatOpenAI(
        model="tiny-chat", base_url=f"{url}/v1", api_key=SecretStr("none"), temperature=0, max_completion_tokens=96
    )
    print(llm.invoke("What is 17 + 25?").content)
    print("".join(str(piece.content) for piece in llm.stream("Count from 1 to 20.")))
    answer = llm.bind_tools([get_weather]).invoke("What is the weather in Paris?")
    (call,) = answer.tool_calls
    print(f"{call['name']}({call['args']}) -> {get_weather.invoke(call['args'])}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
