"""Pictures over HTTP: each dialect's own form, through its own SDK, becomes the same prompt; what is wrong with one is
said in the words of the dialect."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.records.media import MediaAsk
from app.text.chat_template import ChatTemplate
from tests import limits
from tests.api.conftest import ScriptedClient, Server, served, write_model
from tests.media.media_model import END, PAD, START, reader, seeing, write_media_model
from tests.media.pictures import file_of, picture

DATA = base64.b64encode(file_of(picture(56, 84))).decode()
URL = f"data:image/png;base64,{DATA}"
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
TEXT = {"type": "text", "text": "What is it?"}
LARGE = base64.b64encode(file_of(picture(560, 560), "JPEG")).decode()
PICTURE_TOKENS = 6


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedClient]:
    folder = tmp_path_factory.mktemp("pictures")
    own = reader(allowed_media_domains=("images.example",))
    sees = seeing(write_media_model(folder / "m", 512), own, limit_mm_per_prompt={"image": 3})
    fine = seeing(write_media_model(folder / "fine"), own, "fine", mm_processor_kwargs={"max_pixels": 784 * 400})
    plain = seeing(write_media_model(folder / "plain"), own, "plain")
    plain.chat_template = ChatTemplate(
        {"default": "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"}, {}
    )
    client = ScriptedClient(sees, fine, plain, served(write_model(folder / "text"), "text"))
    client.script = lambda request: [40, 41]
    yield client
    own.close()


@pytest.fixture(scope="module")
def server(client: ScriptedClient) -> Iterator[Server]:
    with Server(create_app(client, RequestLimits())) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=limits.patience_s(), verify=False) as http:
        yield http


def shown(client: ScriptedClient) -> tuple[list[int], MediaAsk]:
    """The prompt of the last request, and its pictures."""
    request = client.requests[-1]
    ask = request.asked(MediaAsk)
    assert ask is not None
    return request.prompt_token_ids, ask


def test_texts_beside_a_picture_are_lines_as_without_one(client: ScriptedClient, http: httpx.Client) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    blocks: list[Any] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    items: list[Any] = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    pictures: tuple[Any, Any] = ({"type": "image", "source": source}, {"type": "input_image", "image_url": URL})
    for parts, picture_of, path in ((blocks, pictures[0], "/v1/messages"), (items, pictures[1], "/v1/responses")):
        for content in (parts, [*parts, picture_of, *parts]):
            turns = [{"role": "user", "content": content}]
            body = {"model": "m", "messages": turns, "max_tokens": 2} if path == "/v1/messages" else {"input": turns}
            assert http.post(path, json=body).status_code == 200
            text = client.models["m"].tokenizer.decode(client.requests[-1].prompt_token_ids, False)
            shown_between = f"{START}{PAD * PICTURE_TOKENS}{END}one\ntwo" if len(content) > 2 else ""
            assert f"user\none\ntwo{shown_between}<|im_end|>" in text


def test_a_template_that_writes_texts_alone_takes_pictures(client: ScriptedClient, http: httpx.Client) -> None:
    content = [{"type": "image_url", "image_url": {"url": URL}}, TEXT]
    body = {"model": "plain", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    tokens, _ = shown(client)
    text = client.models["plain"].tokenizer.decode(tokens, False)
    assert text == f"user:{PAD * PICTURE_TOKENS}\nWhat is it?"


def test_every_dialect_s_sdk_makes_the_same_prompt(client: ScriptedClient, server: Server, http: httpx.Client) -> None:
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": limits.patience_s()}
    oai = openai.OpenAI(base_url=f"{server.url}/v1", http_client=openai.DefaultHttpxClient(verify=False), **own)
    ant = anthropic.Anthropic(base_url=server.url, http_client=anthropic.DefaultHttpxClient(verify=False), **own)
    part: Any = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    file: Any = {"type": "file", "file": {"file_data": URL, "filename": "a.png"}}
    prompts, digests, usages = [], [], []
    for one in (part, file):
        messages: Any = [{"role": "user", "content": [one, TEXT]}]
        chat = oai.chat.completions.create(model="m", messages=messages, max_tokens=9)
        assert chat.usage is not None
        usages.append(chat.usage.prompt_tokens)
        prompts.append(shown(client))
        counted = http.post("/tokenize", json={"model": "m", "messages": messages}).json()
        assert (counted["count"], counted["tokens"]) == (chat.usage.prompt_tokens, prompts[-1][0])
    items: Any = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": "What is it?"},
    ]
    response = oai.responses.create(model="m", input=[{"role": "user", "content": items}], max_output_tokens=9)
    assert response.usage is not None
    usages.append(response.usage.input_tokens)
    prompts.append(shown(client))
    counted = http.post(
        "/v1/responses/input_tokens", json={"model": "m", "input": [{"role": "user", "content": items}]}
    )
    assert counted.json()["input_tokens"] == usages[0]
    blocks: Any = [{"role": "user", "content": [BLOCK, TEXT]}]
    message = ant.messages.create(model="m", messages=blocks, max_tokens=9)
    usages.append(message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0))
    prompts.append(shown(client))
    assert ant.messages.count_tokens(model="m", messages=blocks).input_tokens == usages[0]
    assert len({tuple(ids) for ids, _ in prompts}) == len(set(usages)) == 1
    digests = {ask.items[0].digest for _, ask in prompts}
    assert len(digests) == 1
    (item,) = prompts[0][1].items
    assert (item.length, item.grid, item.shape) == (PICTURE_TOKENS, (1, 6, 4), (24, 3, 14, 14))
    assert usages[0] == len(prompts[0][0])


def test_results_of_calls_show_pictures(client: ScriptedClient, http: httpx.Client) -> None:
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, BLOCK], "is_error": True}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result, BLOCK]}]
    messages = [{"role": "user", "content": "Look."}, *turns]
    answer = http.post("/v1/messages", json={"model": "m", "max_tokens": 5, "messages": messages})
    assert answer.status_code == 200, answer.text
    ids, ask = shown(client)
    assert len(ask.items) == 2
    assert "Error: What is it?<|vision_start|>" in client.models["m"].tokenizer.decode(ids, False)
    said = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URL}]},
    ]
    assert http.post("/v1/responses", json={"model": "m", "input": said}).status_code == 200
    assert len(shown(client)[1].items) == 1


def test_detail_is_part_of_a_picture_s_identity(client: ScriptedClient, http: httpx.Client) -> None:
    """Where the grids are equal, too: whoever asked for less detail never gets what was prepared otherwise."""
    for file, grids in ((DATA, 1), (LARGE, 2)):
        found = []
        for detail in ("auto", "low", "high"):
            part = {"type": "image_url", "image_url": {"url": f"data:;base64,{file}", "detail": detail}}
            messages = [{"role": "user", "content": [part]}]
            answer = http.post("/v1/chat/completions", json={"model": "fine", "messages": messages})
            assert answer.status_code == 200, answer.text
            found.append(shown(client)[1].items[0])
        assert found[0].digest == found[2].digest != found[1].digest
        assert len({item.grid for item in found}) == grids


SMALL = base64.b64encode(b"GIF89a\1").decode()
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": "ftp://x/y"}}, "image_url", "of 'ftp'"),
    ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": "data:,<svg/>"}}, "image_url", "is SVG"),
    ("/v1/chat/completions", {"type": "image_url", "image_url": "http://10.0.0.1/"}, "image_url", "its host is none"),
    ("/v1/chat/completions", {"type": "image_url"}, "image_url", "image_url"),
    ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": URL, "detail": "x"}}, "image_url.detail", ""),
    ("/v1/chat/completions", {"type": "file", "file": {"file_id": "f"}}, "", "only file_data is read"),
    ("/v1/chat/completions", {"type": "image_embeds", "image_embeds": "gAN9"}, "", "image_embeds is not supported"),
    (
        "/v1/chat/completions",
        {"type": "video_url", "video_url": {"url": URL}},
        "video_url",
        "is a picture, which is not read; mp4, mov",
    ),
    ("/tokenize", {"type": "image_url", "image_url": {"url": f"data:;base64,{SMALL}"}}, "image_url", "malformed"),
    ("/v1/messages", {**BLOCK, "source": {**BLOCK["source"], "data": "?"}}, "source", "is not base64"),  # type: ignore[dict-item]
    ("/v1/messages", {"type": "image", "source": {"type": "url", "url": "file:///x"}}, "source", "of 'file'"),
    (
        "/v1/messages",
        {"type": "image", "source": {"type": "file", "file_id": "x"}},
        "source.type",
        "not read from files",
    ),
    ("/v1/messages/count_tokens", {**BLOCK, "source": {**BLOCK["source"], "data": SMALL}}, "source", "malformed"),  # type: ignore[dict-item]
    ("/v1/responses", {"type": "input_image", "image_url": "data:,%PDF-"}, "image_url", "is PDF"),
    ("/v1/responses", {"type": "input_image", "file_id": "f"}, "file_id", "not read from files"),
]


@pytest.mark.parametrize(
    ("path", "part", "field", "says"), WRONG, ids=[f"{i}-{one[0][-9:]}" for i, one in enumerate(WRONG)]
)
def test_errors_name_the_field(http: httpx.Client, path: str, part: dict, field: str, says: str) -> None:
    text = {"type": "input_text" if "responses" in path else "text", "text": "x"}
    turns = [{"role": "user", "content": "hi"}, {"role": "user", "content": [text, part]}]
    body = {"model": "m", "input" if "responses" in path else "messages": turns, "max_tokens": 5}
    if path in ("/tokenize", "/v1/responses") or path.endswith("count_tokens"):
        del body["max_tokens"]
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    place = "input" if "responses" in path else "messages"
    named = error.get("param") or error["message"]
    assert named.startswith(".".join(filter(None, (f"{place}.1.content.1", field)))), error
    assert says in error["message"]


def test_a_model_of_text_says_so(http: httpx.Client) -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    for path in ("/v1/chat/completions", "/tokenize", "/v1/chat/completions/render"):
        answer = http.post(path, json={"model": "text", "messages": [{"role": "user", "content": [part]}]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages.0.content.0.image_url")
        assert "'text' reads text only; it takes no pictures" in error["message"]


def test_limits_of_a_prompt(client: ScriptedClient, http: httpx.Client) -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    large = {
        "type": "image_url",
        "image_url": {"url": f"data:;base64,{base64.b64encode(file_of(picture(224, 224))).decode()}"},
    }
    before = len(client.requests)
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = http.post(path, json={"model": "m", "messages": [{"role": "user", "content": [part] * 4}]})
        assert "4 pictures; at most 3 a prompt" in answer.json()["error"]["message"]
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": [large] * 3}]}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    body["messages"][0]["content"].insert(0, {"type": "text", "text": "x " * 400})
    assert http.post("/v1/chat/completions", json=body).json()["error"]["code"] == "context_length_exceeded"
    cut = http.post("/v1/chat/completions", json=body | {"truncate_prompt_tokens": 9}).json()["error"]
    assert (cut["param"], cut["message"]) == (
        "truncate_prompt_tokens",
        "truncate_prompt_tokens: a prompt with pictures or sounds is not cut",
    )
    rendered = http.post(
        "/v1/chat/completions/render", json={"model": "m", "messages": [{"role": "user", "content": [part]}]}
    )
    assert "brings no pictures" in rendered.json()["error"]["message"]
    assert len(client.requests) == before + 1
