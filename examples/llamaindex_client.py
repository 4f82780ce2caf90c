"""LlamaIndex over the server: a chat, a stream, a tool.

    .venv/bin/python examples/llamaindex_client.py [URL]

Needs llama-index-llms-openai-like, as `make setup-dev` has it.
"""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"21 degrees and sunny in {city}"


def main(url: str) -> None:
    """Three questions."""
    llm = OpenAILike(
        model="tiny-chat", api_base=f"{url}/v1", api_key="none", temperature=0, max_tokens=96,
        is_chat_model=True, is_function_calling_model=True, context_window=2048,
    )  # fmt: skip
    print(llm.chat([ChatMessage(role="user", content="What is 17 + 25?")]).message.content)
    pieces = llm.stream_chat([ChatMessage(role="user", content="Count from 1 to 20.")])
    print("".join(piece.delta or "" for piece in pieces))
    tool = FunctionTool.from_defaults(fn=get_weather)
    answer = llm.chat_with_tools([tool], user_msg="What is the weather in Paris?")
    (call,) = llm.get_tool_calls_from_response(answer)
    print(f"{call.tool_name}({call.tool_kwargs}) -> {tool(**call.tool_kwargs)}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
