"""Every error has OpenAI's shape, the right status and the field at fault."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import httpx
import openai
import pytest

from app.api.http.errors import error_body, in_words_of
from app.errors import EngineDeadError, InvalidRequestError, MantaError, OverloadedError, PromptTooLongError
from tests import limits
from tests.api.json_routes import TEXT_BODIES, WITHOUT_TEXT

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert response.headers["x-request-id"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"foo": 1}, "foo", "unknown field 'foo'"),
        ({"messages": None}, "messages", "required"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "the king", "content": "x"}]}, "messages.0.role", "pattern"),
        ({"messages": [{"role": "user"}]}, "messages.0", "content is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "required"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages.0", "use tool_calls"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages.0", "audio is not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages.0.content.1.image_url",
            "is required",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}]},
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
            "not valid JSON",
        ),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"reasoning_effort": "very high"}, "reasoning_effort", "'xhigh'"),
        ({"verbosity": "chatty"}, "verbosity", "'medium'"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"n": 0}, "n", "1"),
        ({"n": 9}, "n", "8"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"stop": 5}, "stop", "valid"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs", "top_logprobs=6: at most 5"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "at most 5"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "integer"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"temperature": 1e39}, "temperature", "10000"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty", "0.0001"),
        ({"priority": 10**40}, "priority", "9223372036854775807"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids", "only allowed with logprobs"),
        ({"logprobs": True, "logprob_token_ids": []}, "logprob_token_ids", "at least 1"),
        ({"logprobs": True, "logprob_token_ids": [99999]}, "logprob_token_ids", "99999"),
        ({"logprobs": True, "logprob_token_ids": list(range(129))}, "logprob_token_ids", "at most 128"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "99999"),
        ({"bad_words": [" "]}, "bad_words", "not a word"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "9 is more than max_tokens=3"),
        ({"min_tokens": 9, "max_completion_tokens": 3}, "min_tokens", "9 is more than max_tokens=3"),
        ({"max_completion_tokens": 600}, "max_completion_tokens", "600 of output"),
        ({"min_tokens": 9999}, "min_tokens", "9999 of output"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what", "unknown field"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"request_id": "a b"}, "request_id", "pattern"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "excludes"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "field of its own"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template", "field of its own"),
    ],
)
def test_bad_chat_fields(http: httpx.Client, fields: dict[str, Any], param: str | None, words: str) -> None:
    error = error_of(http.post(CHAT, json={"model": "m", "messages": HI, **fields}), 400)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"chat_template": "x"}, "chat_template"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_known_but_unsupported_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = error_of(http.post(CHAT, json={"messages": HI, **fields}), 400)
    assert (error["param"], error["code"]) == (param, "unsupported")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": []}, "prompt", "valid string"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a"] * 17}, "prompt", "at most 16"),
        ({"prompt": [1, "a"]}, "prompt.1", "integer"),
        ({"prompt": ["a", 1]}, "prompt.1", "string"),
        ({"prompt": [[1], ["x"]]}, "prompt.1.0", "integer"),
        ({"prompt": [99999]}, "prompt", "token ids must be from 0 to"),
        ({"prompt": {"a": 1}}, "prompt", "string"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 1, "n": 2}, "best_of", "less than n"),
        ({"best_of": 9}, "best_of", "more than the 8"),
        ({"best_of": 3, "stream": True}, "best_of", "stream"),
        ({"use_beam_search": True, "best_of": 9}, "best_of", "8 beams"),
        ({"use_beam_search": True, "stop": "x"}, "stop", "beam search"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature", "0 or 1"),
        ({"length_penalty": 0.5}, "length_penalty", "use_beam_search"),
        ({"early_stopping": "perhaps", "use_beam_search": True}, "early_stopping", "valid boolean"),
        ({"logprobs": 6}, "logprobs", "at most 5"),
        ({"messages": HI}, "messages", "unknown field"),
    ],
)
def test_bad_completion_fields(http: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    error = error_of(http.post(COMPLETIONS, json={"prompt": "x", **fields}), 400)
    assert error["param"] == param
    assert words in error["message"]


def test_unknown_model(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="gpt-9", messages=HI)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "gpt-9" in str(caught.value)


def test_bad_json_routes_and_methods(http: httpx.Client) -> None:
    for raw in (b"{", b"", b'{"messages": [}', b"\xff\xfe"):
        assert "JSON" in error_of(http.post(CHAT, content=raw), 400)["message"]
    assert error_of(http.post(CHAT, content=b"[1]"), 400)["param"] is None
    assert "/v1/nothing" in error_of(http.get("/v1/nothing"), 404)["message"]
    assert "GET" in error_of(http.get("/v1/completions"), 405)["message"]


# Every type but JSON's may be posted by any page without asking; curl -d says that it posts a form.
NOT_JSON = [
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/xjson",
    "",
]


@pytest.mark.parametrize("path", sorted(TEXT_BODIES.keys() | WITHOUT_TEXT))
def test_a_body_that_does_not_say_it_is_json_is_refused(server: Any, path: str) -> None:
    with httpx.Client(base_url=server.url, timeout=limits.patience_s()) as http:
        answers = [http.post(path, content=b"{}", headers={"content-type": kind}) for kind in NOT_JSON]
        answers.append(http.post(path, content=b"{}"))
    for answer in answers:
        assert answer.status_code == 400
        assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"])
def test_json_by_other_names_is_read(http: httpx.Client, kind: str) -> None:
    body = json.dumps({"messages": HI})
    assert http.post(CHAT, content=body, headers={"content-type": kind}).status_code == 200


def test_nested_json_does_not_break_the_server(http: httpx.Client) -> None:
    error_of(http.post(CHAT, content=b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"), 400)
    error_of(http.post(CHAT, content=b'{"a":' * 150 + b"1" + b"}" * 150), 400)


def test_body_too_large(http: httpx.Client) -> None:
    big = json.dumps({"messages": [{"role": "user", "content": "x" * 250_000}]}).encode()
    error = error_of(http.post(CHAT, content=big), 413)
    assert error["code"] == "body_too_large"
    assert "200000" in error["message"]

    def chunks() -> Any:
        for start in range(0, len(big), 10_000):
            yield big[start : start + 10_000]

    error_of(http.post(CHAT, content=chunks()), 413)  # without a declared length


def test_prompt_too_long_says_both_numbers(http: httpx.Client, client: Any) -> None:
    ids = [50] * 600
    for body in ({"prompt": ids}, {"prompt": ids, "stream": True}):
        error = error_of(http.post(COMPLETIONS, json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert "600" in error["message"]
        assert error["param"] == "prompt"
    error = error_of(http.post(CHAT, json={"messages": [{"role": "user", "content": "x y " * 600}]}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    error = error_of(http.post(COMPLETIONS, json={"prompt": ids[:500], "max_tokens": 20}), 400)
    assert "512" in error["message"]
    assert "520" in error["message"]
    assert error["param"] == "max_tokens"
    assert not client.requests


def test_what_the_kv_cache_can_never_hold_is_refused(
    serve: Any, serve_model: Any, make_client: Any, model_dir: Any
) -> None:
    client = make_client(serve_model(model_dir, max_kv_tokens=64))
    url = serve(client).url + COMPLETIONS
    error = error_of(httpx.post(url, json={"prompt": [50] * 60, "max_tokens": 10}), 400)
    assert "KV cache holds 64" in error["message"]
    assert httpx.post(url, json={"prompt": [50] * 50}).status_code == 400  # 16 by default
    assert httpx.post(url, json={"prompt": [50] * 50, "max_tokens": 14}).status_code == 200
    # Without max_tokens a chat takes what there is.
    httpx.post(serve(client).url + CHAT, json={"messages": HI})
    request = client.requests[-1]
    assert request.sampling.max_tokens == 64 - len(request.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineDeadError("the replica is gone"), 503),
        (OverloadedError("full"), 429),
        (PromptTooLongError("600 of 512", param="prompt"), 400),
        (MantaError("broken"), 500),
        (ZeroDivisionError("secret"), 500),
    ],
)
def test_engine_errors_before_the_first_token(
    http: httpx.Client, client: Any, error: Exception, status: int, stream: bool
) -> None:
    client.fail_after = (0, error)
    response = http.post(CHAT, json={"messages": HI, "stream": stream})
    described = error_of(response, status)
    if isinstance(error, MantaError):
        param = "messages" if error.param == "prompt" else error.param  # the dialect's word for it
        assert described["message"] == (f"{param}: {error.message}" if param else error.message)
        assert (described["type"], described["code"], described["param"]) == (error.type, error.code, param)
    else:
        assert "secret" not in response.text
    assert (response.headers.get("retry-after") == "1") == (status in (429, 503))
    assert client.num_running == 0


@pytest.mark.parametrize(
    ("param", "message", "is_named"),
    [
        ("k", "is not known", False),
        ("prompt", "1025 prompts; at most 1024", False),
        ("logprobs", "top_logprobs=6: at most 5", False),
        ("a.c", "abc is not known", False),
        ("n", "n=9: at most 8", True),
        ("messages.0.content", "messages.0.content: is required", True),
        ("(x", "there is no '(x'", True),
    ],
)
def test_a_message_names_its_field_as_a_whole_word(param: str, message: str, is_named: bool) -> None:
    told = error_body(InvalidRequestError(message, param=param))["error"]["message"]
    assert told == (message if is_named else f"{param}: {message}")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_breaks_ends_in_an_error_event(http: httpx.Client, client: Any, path: str) -> None:
    client.fail_after = (3, EngineDeadError("the replica is gone"))
    response = http.post(path, json={"stream": True} | ({"messages": HI} if path == CHAT else {"prompt": "a fox b"}))
    assert response.status_code == 200
    *before, error, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(error[6:]) == {
        "error": {
            "message": "the replica is gone",
            "type": "service_unavailable_error",
            "param": None,
            "code": "engine_unavailable",
        }
    }
    assert len(before) >= 3
    assert error_of(http.post(CHAT, json={"messages": HI}), 503), "without a stream it is a 503"


def test_the_sdk_raises_on_an_error_event(sdk: openai.OpenAI, client: Any) -> None:
    client.fail_after = (2, EngineDeadError("the replica is gone"))
    with pytest.raises(openai.APIError, match="the replica is gone"):
        list(sdk.chat.completions.create(model="m", messages=HI, stream=True))  # type: ignore[call-overload]


def test_one_failed_choice_fails_the_request_and_ends_the_others(http: httpx.Client, client: Any) -> None:
    client.delay_s = 0.01
    outputs = client._outputs

    def failing(model: Any, request: Any) -> Any:
        for i, output in enumerate(outputs(model, request)):
            if i == 2 and request.choice_index == 1:
                raise EngineDeadError("gone")
            yield output

    client._outputs = failing
    client.script = lambda request: [50] * 400
    error_of(http.post(CHAT, json={"messages": HI, "n": 3}), 503)
    assert client.num_running == 0


def test_a_request_that_fails_alone_says_so(http: httpx.Client, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = client._outputs

    def failing(*args: Any) -> Any:
        for output in outputs(*args):
            output.finish_reason, output.error = "error", "this request broke the grammar"
            yield output

    monkeypatch.setattr(client, "_outputs", failing)
    assert "broke the grammar" in error_of(http.post(CHAT, json={"messages": HI}), 500)["message"]


def test_an_engine_that_falls_silent_is_an_error(
    http: httpx.Client, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_outputs", lambda *_: iter(()))
    assert "finish reason" in error_of(http.post(CHAT, json={"messages": HI}), 503)["message"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/models", "; there is /v1/models: the base URL of OpenAI's clients ends in /v1"),
        ("/chat/completions", "; there is /v1/chat/completions: the base URL of OpenAI's clients ends in /v1"),
        ("/v1/v1/messages", "; there is /v1/messages: this client adds /v1 itself, so its base URL must end before it"),
        ("/api/v1/models", "; there is /v1/models: the base URL has a part too much"),
        ("/v1/tokenize", "; there is /tokenize: the base URL has a part too much"),
        ("/v1/realtime", "; it is a websocket: open it with a client of websockets"),
        ("/v1/nothing", "/v1/nothing"),
        ("/" + "v1/" * 2000 + "models", "models"),
    ],
)
def test_a_wrong_base_url_is_told_the_right_one(http: httpx.Client, path: str, says: str) -> None:
    message = error_of(http.post(path, json={}), 404)["message"]
    assert message.startswith("no such route: POST /")
    assert message.endswith(says)


@pytest.mark.parametrize("param", ["prompt", "seed"])
def test_a_refusal_is_gone_with_all_that_it_passed(param: str) -> None:
    """It holds the request's frames: in a cycle they would stay until somebody looks for those."""
    held: list[weakref.ref[Any]] = []

    def refuse() -> None:
        request = {1, 2}  # stands for a body of megabytes
        held.append(weakref.ref(request))
        raise InvalidRequestError("no", param=param)

    told = None
    gc.disable()
    try:
        try:
            with in_words_of({"prompt": "messages"}):
                refuse()
        except InvalidRequestError as error:
            told = error.param
        assert held[0]() is None
        assert told == {"prompt": "messages"}.get(param, param)
    finally:
        gc.enable()
