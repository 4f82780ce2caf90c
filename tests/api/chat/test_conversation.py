"""How hard the model shall think, in every dialect: templates are told in their own words, and no model refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import limits

Ask = Callable[..., str]

TEMPLATES = {
    "plain": "{{ messages[-1].content }}",
    "qwen": "{{ messages[-1].content }}|{{ enable_thinking is defined and enable_thinking }}",
    "deepseek": "{{ messages[-1].content }}|{{ thinking | default(false) }}",
    "gpt_oss": "{{ messages[-1].content }}|{{ reasoning_effort | default('medium') }}|{{ verbosity | default('') }}",
    "strict": "{{ raise_exception('no such conversation') }}",
}


@pytest.fixture
def ask(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    write_model_dir: Callable[..., Path],
    serve_model: Callable[..., Any],
    make_client: Callable[..., Any],
    serve: Callable[..., Any],
) -> Ask:
    """Post a body to a model with this template; the prompt that it became, or the answer that refuses it."""
    path = write_model_dir(tmp_path)
    (path / "chat_template.jinja").write_text(TEMPLATES[request.param])
    client = make_client(serve_model(path))
    url = serve(client).url

    def post(route: str, **fields: Any) -> Any:
        field = "input" if route == "responses" else "messages"
        most = {"max_tokens": 2} if route == "messages" else {}
        body = {"model": "m", field: [{"role": "user", "content": "Hi."}], **most, **fields}
        answer = httpx.post(f"{url}/v1/{route}", json=body, timeout=limits.patience_s())
        if answer.status_code != 200:
            return answer
        return client.models["m"].tokenizer.decode(client.requests[-1].prompt_token_ids)

    return post


@pytest.mark.parametrize("ask", ["plain"], indirect=True)
def test_a_template_that_knows_neither_is_as_it_was(ask: Ask) -> None:
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        assert ask("chat/completions", reasoning_effort=effort) == "Hi."
    assert ask("chat/completions", verbosity="medium") == "Hi."
    assert ask("responses", reasoning={"effort": "high"}, text={"verbosity": "low"}) == "Hi."
    assert ask("messages", output_config={"effort": "max"}) == "Hi."


@pytest.mark.parametrize("ask", ["qwen", "deepseek"], indirect=True)
def test_a_template_that_can_turn_thinking_on(ask: Ask, request: pytest.FixtureRequest) -> None:
    assert ask("chat/completions") == "Hi.|False"
    assert ask("chat/completions", reasoning_effort="none") == "Hi.|False"
    assert ask("chat/completions", reasoning_effort="low") == "Hi.|True"
    assert ask("responses", reasoning={"effort": "high"}) == "Hi.|True"
    assert ask("responses", reasoning={"effort": "none"}) == "Hi.|False"
    own = {"enable_thinking": False, "thinking": False}
    assert ask("chat/completions", reasoning_effort="high", chat_template_kwargs=own) == "Hi.|False"
    assert ask("messages", output_config={"effort": "high"}) == "Hi.|False", (
        "Anthropic's effort is not whether to think"
    )


@pytest.mark.parametrize("ask", ["gpt_oss"], indirect=True)
def test_a_template_that_reads_them(ask: Ask) -> None:
    assert ask("chat/completions", reasoning_effort="low", verbosity="high") == "Hi.|low|high"
    assert ask("responses", reasoning={"effort": "high"}, text={"verbosity": "low"}) == "Hi.|high|low"
    assert ask("messages", output_config={"effort": "xhigh"}) == "Hi.|xhigh|"


@pytest.mark.parametrize("ask", ["strict"], indirect=True)
def test_refusals_name_the_field_that_was_sent(ask: Any) -> None:
    def param(route: str, **fields: Any) -> Any:
        answer = ask(route, **fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        return error["message"] if route == "messages" else error["param"]

    assert param("responses") == "input"
    assert param("chat/completions") == "messages"
    assert param("responses", reasoning={"effort": "very"}) == "reasoning.effort"
    assert param("responses", text={"verbosity": "very"}) == "text.verbosity"
    assert param("responses", stop=[""]) == "stop"
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{oops"}
    assert param("responses", input=[call]) == "input"
    assert param("messages", output_config={"effort": "very"}).startswith("output_config.effort")
    assert param("messages", stop_sequences=[""]).startswith("stop_sequences")
