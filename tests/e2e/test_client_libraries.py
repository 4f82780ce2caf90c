"""The tool loops of the agent libraries, unchanged, over the quickstart server: collected and streamed.

The built-in model calls the tool by itself and answers with what the tool gave, so each library sends back what it
received, in its own words.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from benchmarks.serve_process import ServeProcess

pytestmark = pytest.mark.timeout(300)

QUESTION = "get the price of the stock JXD66."
ANSWER = "The price of JXD66 is 253.83 GBP."
SAMPLING: Any = {"temperature": 0, "max_tokens": 100}


class StockPrices:
    """The tool. `asked` are the calls it got."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_stock_price(self, code: str) -> str:
        """Get the price of a stock."""
        self.asked.append(code)
        return json.dumps({"price": 253.83, "currency": "GBP"})


@pytest.fixture
def prices() -> StockPrices:
    return StockPrices()


@pytest.fixture
def url(quickstart: ServeProcess) -> str:
    return f"{quickstart.base_url}/v1"


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(url: str, prices: StockPrices, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch the prices of models
    import litellm

    parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    function = {"name": "get_stock_price", "description": "Get the price of a stock.", "parameters": parameters}
    body: Any = {"model": "openai/tiny-chat", "api_base": url, "api_key": "none", **SAMPLING}
    body["tools"] = [{"type": "function", "function": function}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(3):
        answer: Any = litellm.completion(messages=messages, stream=stream, **body)
        whole = litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer
        message = whole.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = prices.get_stock_price(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
    assert (messages[-1].content, prices.asked) == (ANSWER, ["JXD66"])


@pytest.mark.parametrize("api", ["chat", "responses", "websocket"])
def test_openai_agents(url: str, prices: StockPrices, api: str) -> None:
    import agents

    agents.set_tracing_disabled(True)
    kinds: dict[str, Any] = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
        "websocket": agents.OpenAIResponsesWSModel,
    }
    kind = kinds[api]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            agent: Any = agents.Agent(
                "assistant",
                instructions="You are a helpful assistant.",
                tools=[agents.function_tool(prices.get_stock_price)],
                model=kind(model="tiny-chat", openai_client=client),
                model_settings=agents.ModelSettings(**SAMPLING),
            )
            whole = await agents.Runner.run(agent, QUESTION)
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            return [whole.final_output, streamed.final_output]

    assert asyncio.run(ask()) == [ANSWER, ANSWER]
    assert prices.asked == ["JXD66", "JXD66"]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_langchain(url: str, prices: StockPrices, api: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI

    tool = StructuredTool.from_function(prices.get_stock_price)
    model: Any = ChatOpenAI(
        model="tiny-chat", base_url=url, api_key="none", max_retries=0, use_responses_api=api == "responses", **SAMPLING
    ).bind_tools([tool])
    for stream in (False, True):
        messages: list[Any] = [HumanMessage(QUESTION)]
        for _ in range(3):
            if stream:
                first, *rest = model.stream(messages)
                messages.append(sum(rest, start=first))
            else:
                messages.append(model.invoke(messages))
            if not messages[-1].tool_calls:
                break
            messages += [tool.invoke(call) for call in messages[-1].tool_calls]
        assert messages[-1].text == ANSWER
    assert prices.asked == ["JXD66", "JXD66"]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai(url: str, prices: StockPrices, api: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
            model: Any = kind("tiny-chat", provider=OpenAIProvider(openai_client=client))
            agent: Any = Agent(model, tools=[prices.get_stock_price], model_settings=SAMPLING)
            whole = await agent.run(QUESTION)
            async with agent.run_stream(QUESTION) as streamed:
                return [whole.output, await streamed.get_output()]

    assert asyncio.run(ask()) == [ANSWER, ANSWER]
    assert prices.asked == ["JXD66", "JXD66"]
