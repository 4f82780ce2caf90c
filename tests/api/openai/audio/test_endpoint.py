"""Transcriptions and translations over a scripted engine: OpenAI's client, its forms, and what is refused."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.audio import TranscriptionVerbose
from openai.types.audio.transcription_create_params import TranscriptionCreateParamsBase

from app.api.openai.audio.forms import TranscriptionForm
from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from app.media.audio.reader import SoundReader
from app.records.alignment_ask import AlignmentAsk
from app.records.encoder_input import EncoderInput
from app.records.transcription_rules import TranscriptionRules
from tests import limits
from tests.api.conftest import ScriptedClient, served
from tests.api.openai.audio.speech_model import (
    NUM_MELS,
    NUM_POSITIONS,
    SPECIAL,
    Transcriber,
    served_speech,
    write_speech_model,
)
from tests.media.audio.hostile import cases as hostile_sounds
from tests.media.audio.sounds import RATE, file_of, noise

URL = "/v1/audio/transcriptions"


@pytest.fixture(scope="session")
def speech_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speech_model(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def speech(speech_dir: Path) -> Iterator[Any]:
    model = served_speech(speech_dir)
    yield model
    assert model.speech is not None
    model.speech.reader.close()


@pytest.fixture
def client(speech: Any) -> Transcriber:
    return Transcriber(speech)


@pytest.fixture
def http(client: Transcriber, http_to: Callable[[Any], httpx.Client]) -> httpx.Client:
    return http_to(create_app(client, RequestLimits()))


@pytest.fixture
def sdk(http: httpx.Client) -> Iterator[openai.OpenAI]:
    transport = openai.DefaultHttpxClient(verify=False)
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": limits.patience_s()}
    with openai.OpenAI(base_url=f"{http.base_url}/v1", http_client=transport, **own) as sdk:
        yield sdk


def named(data: bytes, name: str = "speech.wav") -> io.BytesIO:
    file = io.BytesIO(data)
    file.name = name
    return file


HALF = file_of(noise(0.5))
LONG = file_of(np.concatenate([noise(0.8, seed=i) * (0.0 if i % 2 else 1.0) for i in range(5)]))  # four seconds


def test_openai_s_client(client: Transcriber, sdk: openai.OpenAI) -> None:
    answer = sdk.audio.transcriptions.create(file=named(HALF), model="whisper")
    assert answer.text == "Hello"
    assert answer.usage is not None
    assert answer.usage.to_dict() == {"type": "duration", "seconds": 1}
    (request,), (detection,) = client.transcripts, client.detections
    marks = [client.id_of(name) for name in ("startoftranscript", "en", "transcribe", "notimestamps")]
    assert request.prompt_token_ids == marks
    assert request.sampling.temperature == 0
    heard, rules = request.asked(EncoderInput), request.asked(TranscriptionRules)
    assert heard is not None
    assert rules is not None
    assert rules.times is None
    assert (heard.kind, heard.length, heard.shape) == ("audio", NUM_POSITIONS, (NUM_MELS, 2 * NUM_POSITIONS))
    assert detection.asked(EncoderInput) == heard


def test_an_answer_says_where_its_time_went(client: Transcriber, http: httpx.Client) -> None:
    answer = http.post(URL, files={"file": LONG})
    parts = dict(part.strip().split(";dur=") for part in answer.headers["server-timing"].split(","))
    assert {*parts} == {"read", "decode", "language", "features", "turns", "engine", "hear", "write"}
    spent = {name: float(milliseconds) for name, milliseconds in parts.items()}
    assert all(value >= 0 for value in spent.values())
    assert spent["hear"] >= max(spent["decode"], spent["language"])


@pytest.mark.parametrize(("given", "code"), [("de", "de"), ("German", "de"), ("JA", "ja"), ("english", "en")])
def test_a_language_that_is_given_is_not_looked_for(
    client: Transcriber, sdk: openai.OpenAI, given: str, code: str
) -> None:
    sdk.audio.transcriptions.create(file=named(HALF), model="whisper", language=given)
    assert client.id_of(code) in client.transcripts[0].prompt_token_ids
    assert client.detections == []


def test_a_language_that_is_not_known(client: Transcriber, http: httpx.Client) -> None:
    answer = http.post(URL, data={"model": "whisper", "language": "tlh"}, files={"file": HALF})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "language"
    assert "'tlh'; it knows de, en, ja" in answer.json()["error"]["message"]
    assert client.requests == []


def test_the_language_is_found_out_once(client: Transcriber, sdk: openai.OpenAI) -> None:
    client.hears = "ja"
    verbose = sdk.audio.transcriptions.create(file=named(LONG), model="whisper", response_format="verbose_json")
    assert verbose.language == "japanese"
    assert len(client.transcripts) > 3
    assert all(client.id_of("ja") in request.prompt_token_ids for request in client.transcripts)


def test_a_prompt_goes_before_as_plain_text(client: Transcriber, sdk: openai.OpenAI) -> None:
    sdk.audio.transcriptions.create(file=named(HALF), model="whisper", prompt="Names: Ada <|endoftext|><|de|>")
    tokens = client.transcripts[0].prompt_token_ids
    start = tokens.index(client.id_of("startoftranscript"))
    assert tokens[0] == client.id_of("startofprev")
    assert client.model.tokenizer.decode(tokens[1:start], False).startswith(" Names: Ada")
    assert not set(tokens[1:start]) & {client.id_of("de"), client.id_of("endoftext")}


def test_translation(client: Transcriber, sdk: openai.OpenAI) -> None:
    client.hears = "de"
    assert sdk.audio.translations.create(file=named(HALF), model="whisper").text == "Hello"
    marks = [client.id_of(name) for name in ("startoftranscript", "de", "translate", "notimestamps")]
    assert client.transcripts[0].prompt_token_ids == marks
    verbose = sdk.audio.translations.create(file=named(HALF), model="whisper", response_format="verbose_json")
    assert verbose.language == "english"


def test_verbose_json(client: Transcriber, sdk: openai.OpenAI) -> None:
    client.says = lambda request: "<|0.00|> one<|0.20|><|0.20|> two<|0.44|>"
    verbose = sdk.audio.transcriptions.create(
        file=named(HALF), model="whisper", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert isinstance(verbose, TranscriptionVerbose)
    TranscriptionVerbose.model_validate(verbose.to_dict(), strict=True)
    assert (verbose.text, verbose.language, verbose.duration) == ("one two", "english", 0.5)
    assert verbose.segments is not None
    first, second = verbose.segments
    assert [(one.id, one.seek, one.start, one.end, one.text) for one in (first, second)] == [
        (0, 0, 0.0, 0.2, " one"),
        (1, 0, 0.2, 0.44, " two"),
    ]
    assert first.tokens == client.ids("<|0.00|> one<|0.20|>")
    assert first.avg_logprob == pytest.approx(-0.1)
    assert first.no_speech_prob == pytest.approx(0.01)
    assert first.temperature == 0
    (request,) = client.transcripts
    assert client.id_of("notimestamps") not in request.prompt_token_ids
    rules = request.asked(TranscriptionRules)
    assert rules is not None
    assert rules.times is not None


def test_times_of_words(client: Transcriber, sdk: openai.OpenAI) -> None:
    """Each token is heard 0.04 s behind the one before; the first one, a time, at once."""
    client.says = lambda request: "<|0.00|> one, two<|0.44|>"
    options: dict[str, Any] = {"file": named(HALF), "model": "whisper", "response_format": "verbose_json"}
    verbose = sdk.audio.transcriptions.create(**options, timestamp_granularities=["word"])
    TranscriptionVerbose.model_validate(verbose.to_dict(), strict=True)
    assert verbose.segments is None
    assert [one.word for one in verbose.words] == ["one,", "two"]
    first, second = verbose.words
    assert 0.0 == first.start < first.end == second.start < second.end <= 0.5
    both = sdk.audio.transcriptions.create(
        **{**options, "file": named(HALF)}, timestamp_granularities=["word", "segment"]
    )
    assert both.words == verbose.words
    assert both.segments is not None
    asked = [request for request in client.requests if request.asked(AlignmentAsk) is not None]
    (transcript, _), (aligned, _) = client.transcripts, asked
    end = client.model.info.eos_token_ids[0]
    assert aligned.prompt_token_ids == [*transcript.prompt_token_ids, *client.ids("<|0.00|> one, two<|0.44|>")]
    assert end not in aligned.prompt_token_ids
    ask = aligned.asked(AlignmentAsk)
    assert ask == AlignmentAsk(len(transcript.prompt_token_ids), 25)
    plain = sdk.audio.transcriptions.create(**{**options, "file": named(HALF)})
    assert plain.words is None
    assert len([request for request in client.requests if request.asked(AlignmentAsk) is not None]) == 2


def test_times_of_words_are_those_of_the_file(client: Transcriber, sdk: openai.OpenAI) -> None:
    client.says = lambda request: "<|0.00|> one two<|0.44|>"
    verbose = sdk.audio.transcriptions.create(
        file=named(LONG), model="whisper", response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    begins = [one.start for one in verbose.segments]
    assert len(begins) >= 4
    words = [one for one in verbose.words if one.word == "one"]
    assert [one.start for one in words] == pytest.approx(begins, abs=0.006)


def test_silence_has_no_words(client: Transcriber, sdk: openai.OpenAI) -> None:
    client.logprob, client.no_speech = lambda request: -1.5, 0.9
    verbose = sdk.audio.transcriptions.create(
        file=named(HALF), model="whisper", response_format="verbose_json", timestamp_granularities=["word"]
    )
    assert verbose.words == []
    assert all(request.asked(AlignmentAsk) is None for request in client.requests)


@pytest.mark.parametrize(("change", "said"), [("heads", "alignment_heads"), ("stages", "pipeline_parallel_size=1")])
def test_a_model_that_tells_no_times_of_words(
    speech_dir: Path, tmp_path: Path, http_to: Callable[[Any], httpx.Client], change: str, said: str
) -> None:
    path = shutil.copytree(speech_dir, tmp_path / "other")
    own = json.loads((path / "generation_config.json").read_text())
    if change == "heads":
        del own["alignment_heads"]
    (path / "generation_config.json").write_text(json.dumps(own))
    model = served_speech(path)
    assert model.speech is not None
    if change == "stages":
        model.speech = replace(model.speech, num_stages=2)
    client = Transcriber(model)
    answer = http_to(create_app(client, RequestLimits())).post(
        URL,
        data={"response_format": "verbose_json", "timestamp_granularities[]": "word"},
        files={"file": HALF},
    )
    model.speech.reader.close()
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "timestamp_granularities"
    assert said in answer.json()["error"]["message"]
    assert client.requests == []


def test_long_sounds_are_heard_piece_by_piece(client: Transcriber, sdk: openai.OpenAI) -> None:
    order: dict[bytes, int] = {}

    def says(request: Any) -> str:
        number = order.setdefault(request.asked(EncoderInput).digest, len(order))
        return f"<|0.10|> piece {number}<|0.50|>"

    client.says = says
    verbose = sdk.audio.transcriptions.create(file=named(LONG), model="whisper", response_format="verbose_json")
    assert verbose.duration == 4.0
    assert verbose.segments is not None
    starts = [one.start for one in verbose.segments]
    assert len(starts) == len(client.transcripts) >= 4
    assert starts == sorted(starts)
    assert all(b - a <= 1.0 for a, b in itertools.pairwise(starts))
    assert all(one.end - one.start == pytest.approx(0.4) for one in verbose.segments[:-1])
    assert verbose.text == "".join(one.text for one in verbose.segments).strip()


def int16(seconds: float) -> Any:
    return (noise(seconds)[:, 0] * 32_767).astype(np.int16)


class SlowFile:
    """Stands for a file whose second part is decoded once a piece of its first is asked about."""

    def __init__(self, client: Transcriber, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.has_asked = threading.Event()
        self._error = error
        client.says = self._says
        monkeypatch.setattr(SoundReader, "blocks", lambda _, data, rate: self._blocks())

    def _says(self, request: Any) -> str:
        self.has_asked.set()
        return " Hello"

    def _blocks(self) -> Iterator[Any]:
        yield int16(2.5)
        assert self.has_asked.wait(limits.patience_s())
        if self._error is not None:
            raise self._error
        yield int16(0.2)


def test_pieces_are_heard_while_the_file_is_decoded(
    client: Transcriber, sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowFile(client, monkeypatch)
    answer = sdk.audio.transcriptions.create(file=named(HALF), model="whisper", language="en")
    assert answer.text == " ".join(["Hello"] * len(client.transcripts))
    assert len(client.transcripts) >= 3
    assert answer.usage is not None
    assert answer.usage.to_dict() == {"type": "duration", "seconds": 3}


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_file_that_breaks_off_is_refused_though_pieces_were_heard(
    client: Transcriber,
    http_to: Callable[[Any], httpx.Client],
    monkeypatch: pytest.MonkeyPatch,
    wait_for: Callable[..., Any],
    stream: str,
) -> None:
    """A keep-alive does not send the status before the file is known to be whole."""
    SlowFile(client, monkeypatch, InvalidRequestError("breaks off"))
    http = http_to(create_app(client, RequestLimits(), IngressConfig(sse_keep_alive_s=1e-3)))
    answer = http.post(URL, data={"stream": stream, "language": "en"}, files={"file": HALF})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("file breaks off")
    assert len(client.transcripts) >= 1
    wait_for(lambda: client.num_running == 0, "the end of all pieces")


def test_a_file_is_not_decoded_further_once_its_client_has_left(
    client: Transcriber, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, wait_for: Callable[..., Any]
) -> None:
    has_begun, was_left = threading.Event(), threading.Event()

    def endless(_: SoundReader, data: bytes, rate: int) -> Iterator[Any]:
        has_begun.set()
        try:
            while True:
                yield int16(0.001)
                time.sleep(0.01)
        finally:
            was_left.set()

    monkeypatch.setattr(SoundReader, "blocks", endless)
    while not has_begun.is_set():  # a slow server is left before it decodes anything
        with pytest.raises(httpx.ReadTimeout):
            http.post(URL, data={"language": "en"}, files={"file": HALF}, timeout=limits.scaled_s(0.3))
    wait_for(was_left.is_set, "the end of the decoding")


@pytest.mark.parametrize("form", ["text", "srt", "vtt"])
def test_plain_forms(client: Transcriber, sdk: openai.OpenAI, form: Any) -> None:
    client.says = lambda request: "<|0.00|> one<|0.20|><|0.20|> two<|0.44|>"
    answer = sdk.audio.transcriptions.create(file=named(HALF), model="whisper", response_format=form)
    expected = {
        "text": "one two\n",
        "srt": "1\n00:00:00,000 --> 00:00:00,200\none\n\n2\n00:00:00,200 --> 00:00:00,440\ntwo\n",
        "vtt": "WEBVTT\n\n00:00:00.000 --> 00:00:00.200\none\n\n00:00:00.200 --> 00:00:00.440\ntwo\n",
    }
    assert str(answer) == expected[form]


def test_logprobs(client: Transcriber, sdk: openai.OpenAI) -> None:
    answer = sdk.audio.transcriptions.create(file=named(HALF), model="whisper", include=["logprobs"])
    assert answer.logprobs is not None
    assert "".join(one.token or "" for one in answer.logprobs) == " Hello"
    assert {one.logprob for one in answer.logprobs} == {-0.1}
    assert bytes(int(byte) for one in answer.logprobs for byte in one.bytes or ()) == b" Hello"


def test_streams(client: Transcriber, sdk: openai.OpenAI) -> None:
    client.says = lambda request: " Hello there. "
    events = list(sdk.audio.transcriptions.create(file=named(LONG), model="whisper", stream=True, include=["logprobs"]))
    *deltas, done = events
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas) == done.text
    assert done.text.startswith("Hello there.  Hello there.")
    assert not done.text.endswith(" ")
    assert done.usage is not None
    assert done.usage.input_token_details is not None
    assert done.usage.input_token_details.audio_tokens == 200
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    assert done.logprobs is not None
    assert sum(len(event.logprobs or ()) for event in deltas) <= len(done.logprobs)


def test_events_come_while_the_engine_speaks(
    client: Transcriber, http: httpx.Client, wait_for: Callable[..., Any]
) -> None:
    client.says = lambda request: " one two three"
    client.gate, client.gate_after = asyncio.Event(), 2
    with http.stream("POST", URL, data={"stream": "true", "language": "en"}, files={"file": HALF}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["type"] == "transcript.text.delta"
        client.open()
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["text"] == "one two three"


def test_a_client_that_leaves_ends_its_pieces(
    client: Transcriber, http: httpx.Client, wait_for: Callable[..., Any]
) -> None:
    client.gate, client.gate_after = asyncio.Event(), 1
    with http.stream("POST", URL, data={"stream": "true", "language": "en"}, files={"file": LONG}) as answer:
        next(line for line in answer.iter_lines() if line)
    wait_for(lambda: client.num_running == 0, "the end of all pieces")
    assert client.num_aborted >= 1


def test_a_stream_takes_nothing_back(client: Transcriber, sdk: openai.OpenAI) -> None:
    """A piece that would be silence were it judged has been sent already."""
    client.logprob, client.no_speech = lambda request: -1.5, 0.9
    *deltas, done = sdk.audio.transcriptions.create(file=named(LONG), model="whisper", stream=True)
    assert client.detections
    assert done.text.startswith("Hello Hello")
    assert "".join(event.delta for event in deltas) == done.text


def test_times_are_no_circles(client: Transcriber, sdk: openai.OpenAI) -> None:
    """Times compress well, and are no part of what is said."""
    times = "".join(f"<|{i / 50:.2f}|>" * 2 for i in range(1, 50))
    client.says = lambda request: f"<|0.00|> one two{times}"
    verbose = sdk.audio.transcriptions.create(file=named(HALF), model="whisper", response_format="verbose_json")
    assert verbose.text == "one two"
    assert verbose.segments is not None
    assert verbose.segments[0].temperature == 0
    assert len(client.transcripts) == 1


def test_higher_temperatures_are_tried(client: Transcriber, sdk: openai.OpenAI) -> None:
    client.logprob = lambda request: -2.0 if request.sampling.temperature < 0.4 else -0.5
    verbose = sdk.audio.transcriptions.create(file=named(HALF), model="whisper", response_format="verbose_json")
    assert verbose.segments is not None
    assert {one.temperature for one in verbose.segments} == {0.4}
    assert [request.sampling.temperature for request in client.transcripts] == [0.0, 0.2, 0.4]
    assert len({request.asked(EncoderInput).digest for request in client.requests}) == 1  # type: ignore[union-attr]


def test_what_goes_in_circles_is_tried_again(client: Transcriber, sdk: openai.OpenAI) -> None:
    client.says = lambda request: " no no" if request.sampling.temperature else " no" * 50
    assert sdk.audio.transcriptions.create(file=named(HALF), model="whisper").text == "no no"


def test_a_temperature_that_is_given_is_the_only_one(client: Transcriber, sdk: openai.OpenAI) -> None:
    client.logprob = lambda request: -2.0
    sdk.audio.transcriptions.create(file=named(HALF), model="whisper", temperature=0.3, extra_body={"seed": 7})
    (request,) = client.transcripts
    assert (request.sampling.temperature, request.sampling.seed) == (0.3, 7)


def test_a_transcript_fits_the_context(speech_dir: Path, http_to: Callable[[Any], httpx.Client]) -> None:
    model = served_speech(speech_dir)
    model.max_model_len = 12
    assert model.speech is not None
    client = Transcriber(model)
    client.says = lambda request: " one two three four five six"
    answer = http_to(create_app(client, RequestLimits())).post(
        URL, data={"language": "en", "prompt": "Names: Ada and many others"}, files={"file": HALF}
    )
    model.speech.reader.close()
    assert answer.status_code == 200, answer.text
    (request,) = client.transcripts
    assert request.sampling.max_tokens is not None
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == 12
    assert request.prompt_token_ids[0] == client.id_of("startofprev")


def test_languages_by_the_names_of_their_tokens(speech_dir: Path, tmp_path: Path) -> None:
    """Generation settings of older checkpoints do not list them."""
    path = shutil.copytree(speech_dir, tmp_path / "older")
    own = json.loads((path / "generation_config.json").read_text())
    named = served_speech(speech_dir).speech
    for left_out in ("lang_to_id", "task_to_id", "no_timestamps_token_id"):
        del own[left_out]
    for is_multilingual in (True, False):
        (path / "generation_config.json").write_text(json.dumps({**own, "is_multilingual": is_multilingual}))
        found = served_speech(path).speech
        assert found is not None
        assert named is not None
        expected = replace(named.info, is_multilingual=True)
        assert (found.info == expected) == is_multilingual
        assert bool(found.info.languages) == is_multilingual


def test_silence_is_no_text(client: Transcriber, sdk: openai.OpenAI) -> None:
    client.logprob, client.no_speech = lambda request: -1.5, 0.9
    assert sdk.audio.transcriptions.create(file=named(HALF), model="whisper").text == ""
    assert len(client.transcripts) == 1
    assert len(client.detections) == 1  # for the language
    client.logprob = lambda request: -0.5  # it trusts its text
    assert sdk.audio.transcriptions.create(file=named(HALF), model="whisper").text == "Hello"


@pytest.mark.parametrize(("no_speech", "text"), [(0.9, ""), (0.3, "Hello")])
def test_what_tells_silence_comes_with_the_text(
    client: Transcriber, http: httpx.Client, no_speech: float, text: str
) -> None:
    """Asked apart where an engine does not tell, and where the prompt has a text, or the answer the number itself."""
    client.logprob, client.no_speech = lambda request: -1.5, no_speech
    fields = {"language": "en", "temperature": "0.2"}
    assert http.post(URL, data=fields, files={"file": HALF}).json()["text"] == text
    assert (len(client.transcripts), len(client.detections)) == (1, 0)
    for tells, more in ((False, {}), (True, {"prompt": "Ada"}), (True, {"response_format": "verbose_json"})):
        client.requests.clear()
        client.tells_silence = tells
        answer = http.post(URL, data={**fields, **more}, files={"file": HALF}).json()
        assert answer["text"] == text
        assert (len(client.transcripts), len(client.detections)) == (1, 1)
        for segment in answer.get("segments", ()):
            assert segment["no_speech_prob"] == pytest.approx(no_speech)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": "diarized_json"}, "response_format", "who speaks"),
        ({"response_format": "xml"}, "response_format", "json"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "verbose_json"),
        ({"include[]": "logprobs", "response_format": "text"}, "include", "json"),
        ({"include[]": "item"}, "include", "logprobs"),
        ({"stream": "true", "response_format": "srt"}, "response_format", "srt"),
        ({"stream": "perhaps"}, "stream", "boolean"),
        ({"temperature": "1.5"}, "temperature", "1"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"temperature": "nan"}, "temperature", "number"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", "quiet points"),
        ({"known_speaker_names[]": "ada"}, "known_speaker_names", "who speaks"),
        ({"languages[]": "en"}, "languages", "one language"),
        ({"prompt": "x" * 20_000}, "prompt", "16384"),
        ({"language": "x" * 100}, "language", "64"),
        ({"seed": "-1"}, "seed", "0"),
        ({"wrod": "1"}, "wrod", "wrod"),
        ({"model": "none"}, "model", "does not exist"),
    ],
)
def test_what_is_refused(
    client: Transcriber, http: httpx.Client, fields: dict[str, str], param: str, said: str
) -> None:
    answer = http.post(URL, data=fields, files={"file": HALF})
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["param"].partition(".")[0] == param, error
    assert said in error["message"], error
    assert client.requests == []


def test_files_that_are_none(client: Transcriber, http: httpx.Client) -> None:
    for files, said in (
        ({"file": b""}, "is empty"),
        ({"file": b"hello"}, "file is no sound that is known"),
        ({"sound": HALF}, "not a file"),
        ({"file": (None, "text")}, "as a file"),
    ):
        answer = http.post(URL, files=files)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
    assert http.post(URL, json={"file": "x"}).status_code == 400
    assert client.requests == []


def test_a_larger_file_is_refused(client: Transcriber, http_to: Callable[[Any], httpx.Client]) -> None:
    http = http_to(create_app(client, RequestLimits(max_sound_bytes=10_000)))
    answer = http.post(URL, files={"file": HALF})
    assert answer.status_code == 413
    assert "10000 bytes" in answer.json()["error"]["message"]
    answer = http.post(URL, files={"file": b"\0" * 100_000})
    assert answer.status_code == 413


def test_sounds_count_as_held(client: Transcriber, http_to: Callable[[Any], httpx.Client]) -> None:
    http = http_to(create_app(client, RequestLimits(max_bodies_bytes=1 << 17)))
    assert http.post(URL, files={"file": HALF}).status_code == 200
    assert http.post(URL, files={"file": LONG}).status_code == 429


def test_a_sound_that_shows_its_length_counts_before_it_is_decoded(
    client: Transcriber, http_to: Callable[[Any], httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(SoundReader, "blocks", lambda _, data, rate: decoded.append(rate))
    http = http_to(create_app(client, RequestLimits(max_bodies_bytes=1 << 17)))
    data = file_of(noise(4.0), "OGG", subtype="OPUS")
    assert len(data) < 1 << 15
    assert http.post(URL, files={"file": data}).status_code == 429
    assert decoded == []


def test_a_model_that_does_not_transcribe(model_dir: Path, http_to: Callable[[Any], httpx.Client]) -> None:
    http = http_to(create_app(ScriptedClient(served(model_dir)), RequestLimits()))
    answer = http.post(URL, files={"file": HALF})
    assert answer.status_code == 400
    assert "does not transcribe" in answer.json()["error"]["message"]


def test_a_transcriber_does_nothing_else(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "hi"})):
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert "/v1/audio/transcriptions" in answer.json()["error"]["message"]


def test_a_form_that_is_sent_again(client: Transcriber, http: httpx.Client) -> None:
    """With the same key and another boundary, as clients make one up each time."""
    texts = []
    for boundary in ("a" * 20, "b" * 30):
        headers = {"idempotency-key": "k1", "content-type": f"multipart/form-data; boundary={boundary}"}
        body = _form(boundary, HALF)
        answer = http.post(URL, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        texts.append(answer.text)
    assert texts[0] == texts[1]
    assert len(client.transcripts) == 1
    headers = {"idempotency-key": "k1", "content-type": "multipart/form-data; boundary=cc"}
    assert http.post(URL, content=_form("cc", file_of(noise(0.4))), headers=headers).status_code == 422


def _form(boundary: str, data: bytes) -> bytes:
    head = f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'.encode()
    return head + data + f"\r\n--{boundary}--\r\n".encode()


def test_every_field_of_openai_s_client_is_known(http: httpx.Client) -> None:
    """Read, refused or ignored by name: none is unknown."""
    known = {*TranscriptionForm.model_fields, *TranscriptionForm.refused, *TranscriptionForm.ignored, "file"}
    assert set(TranscriptionCreateParamsBase.__annotations__) - known == set()


def test_marks_are_tokens(client: Transcriber) -> None:
    assert all(len(client.ids(mark)) == 1 for mark in SPECIAL)
    assert re.fullmatch(r"<\|0\.02\|>", client.model.tokenizer.id_to_token(client.id_of("0.00") + 1) or "")


@pytest.mark.usefixtures("speech")
def test_rates_of_files(client: Transcriber, http: httpx.Client) -> None:
    assert RATE == 16_000
    for rate in (8_000, 44_100):
        answer = http.post(URL, data={"language": "en"}, files={"file": file_of(noise(0.5, rate), rate=rate)})
        assert answer.json()["text"] == "Hello"


def test_hostile_files_are_answered_and_disturb_nobody(client: Transcriber, http: httpx.Client) -> None:
    """A sample; `tests/media/audio/test_hostile.py` has all."""
    for name, data, is_refused in hostile_sounds()[::5]:
        answer = http.post(URL, data={"model": "whisper"}, files={"file": data})
        assert (answer.status_code == 400) == is_refused, (name, answer.text)
        if is_refused:
            error = answer.json()["error"]
            assert error["param"] == "file", (name, error)
            assert 15 < len(error["message"]) < 400, (name, error)
        else:
            assert answer.json()["text"].startswith("Hello"), (name, answer.text)
    assert http.post(URL, data={"model": "whisper"}, files={"file": HALF}).json()["text"] == "Hello"
