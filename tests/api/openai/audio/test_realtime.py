"""Realtime transcription sessions over a scripted engine: OpenAI's client, voice activity, bounds and refusals."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import openai
import pydantic
import pytest
from openai.types.realtime import RealtimeServerEvent
from websockets.exceptions import ConnectionClosed, InvalidStatus

from app.api.http.auth import ApiKey, ApiKeys
from app.api.openai.audio.realtime_item import HEADER_BYTES
from app.api.openai.audio.realtime_protocol import RATE
from app.api.openai.audio.realtime_session import MAX_ITEMS_WAITING
from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.records.encoder_input import EncoderInput
from tests import limits
from tests.api.openai.audio.speech_model import Transcriber, served_speech, write_speech_model

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RealtimeServerEvent)
NAME = "conversation.item.input_audio_transcription"
MANUAL = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = served_speech(write_speech_model(tmp_path_factory.mktemp("whisper")))
    yield model
    assert model.speech is not None
    model.speech.reader.close()


@pytest.fixture
def client(speech: Any) -> Transcriber:
    return Transcriber(speech)


@pytest.fixture
def connect(client: Transcriber, http_to: Any) -> Iterator[Callable[..., Any]]:
    """Opens sessions by OpenAI's client, each on a server of its own unless `app` is given."""
    with ExitStack() as stack:

        def start(
            most: RequestLimits | None = None, keys: ApiKeys | None = None, app: Any = None, key: str = "none",
            query: Any = None, **ingress: Any,
        ) -> Any:  # fmt: skip
            app = app or create_app(client, most or RequestLimits(), IngressConfig(**ingress), keys=keys or ApiKeys())
            sdk = stack.enter_context(openai.OpenAI(base_url=f"{http_to(app).base_url}/v1", api_key=key, max_retries=0))
            options: Any = {"open_timeout": limits.patience_s(), "proxy": None}
            opened = sdk.realtime.connect(extra_query=query or {}, websocket_connection_options=options)
            connection = stack.enter_context(opened)
            connection.app = app  # type: ignore[attr-defined]
            return connection

        yield start


def closing(connection: Any) -> str:
    """Why the server closes the socket."""
    try:
        while True:
            connection.recv_bytes()
    except ConnectionClosed as error:
        return "" if error.rcvd is None else error.rcvd.reason


def sound(seconds: float, loud: bool = True, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    wave = rng.normal(0, 3000 if loud else 3, round(seconds * RATE))
    return wave.clip(-32_768, 32_767).astype("<i2").tobytes()


def say(connection: Any, data: bytes, step_s: float = 0.1) -> None:
    step = round(step_s * RATE) * 2
    for begin in range(0, len(data), step):
        connection.input_audio_buffer.append(audio=base64.b64encode(data[begin : begin + step]).decode())


def events(connection: Any, until: str, count: int = 1) -> list[Any]:
    """Those up to the count-th of a kind; each is one that OpenAI's client knows."""
    found: list[Any] = []
    while sum(event.type == until for event in found) < count:
        data = connection.recv_bytes()
        event = EVENT.validate_json(data)
        assert event.type == json.loads(data)["type"]
        found.append(event)
    return found


def test_voices_become_items_and_texts(client: Transcriber, connect: Any) -> None:
    client.says = lambda request: " Hello there."
    connection = connect()
    created = events(connection, "session.created")[-1].session
    assert (created.type, created.audio.input.turn_detection.type) == ("transcription", "server_vad")
    speech = sound(0.6, seed=1)
    say(connection, sound(1.0, loud=False) + speech + sound(0.8, loud=False) + sound(0.5, seed=2) + sound(0.9, False))
    found = events(connection, f"{NAME}.completed", 2)
    kinds = [event.type for event in found if not event.type.startswith(NAME)]
    once = ["speech_started", "speech_stopped", "committed"]
    item = [*(f"input_audio_buffer.{kind}" for kind in once), "conversation.item.added", "conversation.item.done"]
    assert kinds == item * 2
    started = [event for event in found if event.type.endswith("speech_started")]
    stopped = [event for event in found if event.type.endswith("speech_stopped")]
    assert [event.audio_start_ms for event in started] == pytest.approx([700, 2_100], abs=60)
    assert [event.audio_end_ms for event in stopped] == pytest.approx([2_100, 3_400], abs=60)
    first, second = (event for event in found if event.type.endswith("committed"))
    assert (first.previous_item_id, second.previous_item_id) == (None, first.item_id)
    assert (
        [event.item_id for event in started] == [event.item_id for event in stopped] == [first.item_id, second.item_id]
    )
    done = [event for event in found if event.type == f"{NAME}.completed"]
    assert [(event.item_id, event.transcript) for event in done] == [
        (first.item_id, "Hello there. Hello there."), (second.item_id, "Hello there. Hello there."),
    ]  # fmt: skip
    for item_id in (first.item_id, second.item_id):
        deltas = [event.delta for event in found if event.type == f"{NAME}.delta" and event.item_id == item_id]
        assert len(deltas) > 1
    assert done[0].usage.type == "tokens"
    heard = [request.asked(EncoderInput) for request in client.transcripts]
    assert len({one.digest for one in heard if one is not None}) == 4  # of a model that hears a second at a time


def test_a_client_that_commits(client: Transcriber, connect: Any) -> None:
    connection = connect()
    audio = {"turn_detection": None, "transcription": {"language": "de", "prompt": "Ada"}}
    connection.session.update(session={"type": "transcription", "audio": {"input": audio}})
    updated = events(connection, "session.updated")[-1].session
    assert (updated.audio.input.turn_detection, updated.audio.input.transcription.language) == (None, "de")
    say(connection, sound(0.4))
    connection.input_audio_buffer.clear()
    assert [event.type for event in events(connection, "input_audio_buffer.cleared")] == ["input_audio_buffer.cleared"]
    connection.input_audio_buffer.commit()
    error = events(connection, "error")[-1].error
    assert error.code == "input_audio_buffer_commit_empty"
    say(connection, sound(0.4))
    connection.input_audio_buffer.commit()
    found = events(connection, f"{NAME}.completed")
    assert not any("speech" in event.type for event in found)
    assert found[-1].transcript == "Hello"
    (request,) = client.transcripts
    assert client.id_of("de") in request.prompt_token_ids
    assert request.prompt_token_ids[0] == client.id_of("startofprev")
    heard = request.asked(EncoderInput)
    assert heard is not None


def test_the_older_form(client: Transcriber, connect: Any) -> None:
    connection = connect(query={"intent": "transcription"})
    own = {
        "input_audio_format": "pcm16",
        "turn_detection": None,
        "include": ["item.input_audio_transcription.logprobs"],
    }
    own["input_audio_transcription"] = {"model": "whisper"}
    connection.send_raw(json.dumps({"type": "transcription_session.update", "session": own}))
    created, updated = (json.loads(connection.recv_bytes()) for _ in range(2))
    assert created["type"] == "transcription_session.created"
    assert updated["type"] == "transcription_session.updated"
    assert updated["session"] == created["session"] | own | {
        "input_audio_transcription": {"model": "whisper", "language": None, "prompt": None}
    }
    say(connection, sound(0.3))
    connection.input_audio_buffer.commit()
    found = events(connection, f"{NAME}.completed")
    assert [event.type for event in found][:2] == ["input_audio_buffer.committed", "conversation.item.created"]
    assert "".join(entry.token for entry in found[-1].logprobs) == " Hello"


def test_without_texts(client: Transcriber, connect: Any) -> None:
    connection = connect()
    audio = {"turn_detection": None, "transcription": None}
    connection.send_raw(json.dumps({"type": "session.update", "session": {"audio": {"input": audio}}}))
    say(connection, sound(0.3))
    connection.input_audio_buffer.commit()
    connection.input_audio_buffer.clear()
    assert events(connection, "input_audio_buffer.cleared")
    assert client.requests == []


REFUSED: list[tuple[Any, str | None, str]] = [
    ({"type": "response.create"}, "type", "transcribes"),
    ({"type": "input_audio_buffer.wrod"}, "type", "must be one of"),
    ({"type": "input_audio_buffer.append"}, "audio", "required"),
    ({"type": "input_audio_buffer.append", "audio": "?"}, "audio", "base64"),
    ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "audio", "3 bytes"),
    ({"type": "input_audio_buffer.append", "audio": "A" * 40_000}, "audio", "bytes make an item"),
    ({"type": "session.update", "session": {"type": "realtime"}}, "session.type", "transcription"),
    ({"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}}, "", "G.711"),
    ({"type": "session.update", "session": {"audio": {"input": {"format": {"rate": 16_000}}}}}, "", "24000"),
    ({"type": "session.update", "session": {"audio": {"output": {"voice": "x"}}}}, "", "answers nothing"),
    (
        {"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}},
        "session.audio.input.turn_detection", "semantic_vad",
    ),
    ({"type": "transcription_session.update", "session": {"input_audio_format": "g711_ulaw"}}, "", "G.711"),
    ([1], None, "object"),
    ("{", None, "JSON"),
    ("[" * 200, None, "deep"),
]  # fmt: skip


def test_what_is_refused(connect: Any) -> None:
    """Each by an event of its own, and the session goes on."""
    connection = connect(RequestLimits(max_sound_bytes=HEADER_BYTES + 20_000))
    events(connection, "session.created")
    for event, param, said in REFUSED:
        if isinstance(event, dict):
            event["event_id"] = "mine"
        connection.send_raw(event if isinstance(event, str) else json.dumps(event))
        error = events(connection, "error")[-1].error
        assert said in f"{error.param} {error.message}", error
        assert param is None or (error.param or "").startswith(param), error
        assert error.event_id == ("mine" if isinstance(event, dict) else None)
    connection.input_audio_buffer.clear()
    events(connection, "input_audio_buffer.cleared")


def test_a_model_that_is_none_fails_the_item(client: Transcriber, connect: Any) -> None:
    connection = connect(query={"model": "none"})
    connection.send_raw(json.dumps({"type": "session.update", "session": MANUAL}))
    say(connection, sound(0.3))
    connection.input_audio_buffer.commit()
    error = events(connection, f"{NAME}.failed")[-1].error
    assert "does not exist" in error.message


def test_bounds(client: Transcriber, connect: Any, wait_for: Any) -> None:
    """Of the buffer, of items that wait, and of memory, which is given back."""
    connection = connect(RequestLimits(max_sound_bytes=HEADER_BYTES + 20_000))
    held = connection.app.state.held
    connection.send_raw(json.dumps({"type": "session.update", "session": MANUAL}))
    say(connection, sound(0.4), 0.2)
    say(connection, sound(0.1))
    assert "commit it, or clear it" in events(connection, "error")[-1].error.message
    wait_for(lambda: held.total == len(sound(0.4)), "no more than what is kept is held")
    client.gate, client.gate_after = asyncio.Event(), 0
    connection.input_audio_buffer.commit()
    events(connection, "input_audio_buffer.committed")
    wait_for(lambda: client.num_running, "the first item is asked for")
    for _ in range(MAX_ITEMS_WAITING + 1):
        say(connection, sound(0.1))
        connection.input_audio_buffer.commit()
    failed = events(connection, f"{NAME}.failed")[-1]
    assert "wait for their texts" in failed.error.message
    client.open()
    events(connection, f"{NAME}.completed", 1 + MAX_ITEMS_WAITING)
    wait_for(lambda: held.total == 0, "all is given back")


def test_speech_without_a_pause_is_cut(client: Transcriber, connect: Any) -> None:
    connection = connect(RequestLimits(max_sound_bytes=HEADER_BYTES + 2 * RATE))
    say(connection, sound(2.5) + sound(0.8, loud=False))
    found = events(connection, f"{NAME}.completed", 3)
    stopped = [event.audio_end_ms for event in found if event.type.endswith("speech_stopped")]
    assert len(stopped) == 3
    assert stopped[0] <= 1_000


def test_who_may_open_one(client: Transcriber, connect: Any) -> None:
    keys = ApiKeys([ApiKey.parse("alice=key-of-alice", "")])
    with pytest.raises(InvalidStatus, match="401"):
        connect(keys=keys)
    app = create_app(client, RequestLimits(), IngressConfig(max_tenant_sockets=1), keys=keys)
    connection = connect(app=app, key="key-of-alice")
    events(connection, "session.created")
    with pytest.raises(InvalidStatus, match="429"):
        connect(app=app, key="key-of-alice")
    connection.send_raw(json.dumps({"type": "session.update", "session": MANUAL}))
    keys._keys = ApiKeys([ApiKey.parse("bob=key-of-bob", "")])._keys  # it is withdrawn
    say(connection, sound(0.3))
    connection.input_audio_buffer.commit()
    assert events(connection, f"{NAME}.failed")[-1].error.type == "authentication_error"


def test_idle_and_old_sessions_end(connect: Any) -> None:
    for options, said in (({"socket_idle_s": 0.2}, "idle"), ({"max_socket_s": 0.2}, "too old")):
        assert said in closing(connect(**options))


def test_a_client_that_leaves_ends_its_item(client: Transcriber, connect: Any, wait_for: Any) -> None:
    connection = connect()
    client.gate, client.gate_after = asyncio.Event(), 0
    connection.send_raw(json.dumps({"type": "session.update", "session": MANUAL}))
    say(connection, sound(0.3))
    connection.input_audio_buffer.commit()
    wait_for(lambda: client.num_running, "the item is asked for")
    connection.close()
    wait_for(lambda: not client.num_running, "its end")
    wait_for(lambda: connection.app.state.held.total == 0, "all is given back")
