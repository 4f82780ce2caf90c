"""Examples that talk to a server."""

from __future__ import annotations

import importlib.util
import re

import pytest

from benchmarks.serve_process import ServeProcess
from tests.examples.conftest import RunExample


def test_openai_chat(run_example: RunExample, server: ServeProcess) -> None:
    printed = run_example("openai_chat", server.base_url)
    assert printed.count("= 42") == 2
    assert "prompt tokens" in printed


def test_openai_streaming(run_here: RunExample, server: ServeProcess) -> None:
    printed = run_here("openai_streaming", server.base_url)
    assert ", ".join(map(str, range(1, 21))) in printed
    assert "tokens, first after" in printed


def test_openai_logprobs(run_here: RunExample, server: ServeProcess) -> None:
    printed = run_here("openai_logprobs", server.base_url)
    right, wrong = (float(line.rsplit(" ", 1)[1]) for line in printed.splitlines()[-2:])
    assert right > wrong


def test_openai_tools(run_here: RunExample, server: ServeProcess) -> None:
    printed = run_here("openai_tools", server.base_url)
    assert "get_weather(" in printed
    assert "'city': 'Paris'" in printed
    assert "21" in printed.splitlines()[-1]


@pytest.mark.parametrize("name", ["langchain_client", "litellm_client"])
def test_other_clients(name: str, run_here: RunExample, server: ServeProcess) -> None:
    *_, answer, count, call = run_here(name, server.base_url).splitlines()
    assert "42" in answer
    assert ", ".join(map(str, range(1, 21))) in count
    assert call.startswith("get_weather(")
    assert "Paris" in call


def test_llamaindex_client(run_here: RunExample, server: ServeProcess) -> None:
    *_, answer, count, call = run_here("llamaindex_client", server.base_url).splitlines()
    assert "= 42" in answer
    assert ", ".join(map(str, range(1, 21))) in count
    assert call == "get_weather({'city': 'Paris'}) -> 21 degrees and sunny in Paris"


def test_structured_output(run_here: RunExample, server: ServeProcess) -> None:
    lines = dict(line.split(": ", 1) for line in run_here("structured_output", server.base_url).splitlines())
    assert re.fullmatch(r"Sum\(left=\d{1,3}, operator='[-+*]', right=\d{1,3}\)", lines["pydantic"])
    assert lines["choice"] in ("more than forty", "less than forty")
    assert re.fullmatch(r"It is \d{2}\.", lines["regex"])
    assert re.fullmatch(r"[1-9]\d \+ [1-9]\d = [1-9]\d", lines["grammar"])


def test_several_models(run_here: RunExample, server: ServeProcess) -> None:
    lines = run_here("several_models", server.base_url).splitlines()
    assert [line.split(":")[0] for line in lines] == ["tiny-chat", "tiny-chat-draft"]
    assert "9" in lines[0]


def test_anthropic_client(run_here: RunExample, server: ServeProcess) -> None:
    answer, count, call, told = run_here("anthropic_client", server.base_url).splitlines()
    assert "= 42" in answer
    assert re.search(r" \d+ tokens$", answer)
    assert ", ".join(map(str, range(1, 21))) in count
    assert call == "get_weather({'city': 'Paris'})"
    assert "21" in told


def test_responses_client(run_here: RunExample, server: ServeProcess) -> None:
    first, second, count, usage, end = run_here("responses_client", server.base_url).splitlines()
    assert first.startswith("1: ")
    assert "Ada" in second  # which the second request does not say: the server kept it
    assert ", ".join(map(str, range(1, 21))) in count
    assert re.fullmatch(r"\d+ tokens in, \d+ out", usage)
    assert end == "forgotten"


@pytest.mark.skipif(importlib.util.find_spec("gradio") is not None, reason="Gradio is installed")
def test_gradio_missing_is_said(run_example: RunExample) -> None:
    assert "pip install gradio" in run_example("gradio_chat", expected_status=1)
