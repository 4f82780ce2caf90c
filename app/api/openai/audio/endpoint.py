"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import uuid
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.endpoint import Api, Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import find_model
from app.api.generation.sse import EventStreamResponse
from app.api.http.form import FORM_BYTES, fields_of, form_description, read_form, uploaded
from app.api.http.held_bytes import holding_of
from app.api.http.json_response import json_response
from app.api.http.origin import check_origin
from app.api.http.work_pool import TOKENISE_S_PER_CHAR, RequestWork, unwatched_work_of, work_of
from app.api.openai.audio.attempts import TEMPERATURES, Ask
from app.api.openai.audio.events import TranscriptEvents
from app.api.openai.audio.forms import (
    FILE,
    MAX_FIELDS,
    MAX_PROMPT_CHARS,
    SoundForm,
    TranscriptionForm,
    TranslationForm,
)
from app.api.openai.audio.incoming import Incoming
from app.api.openai.audio.listening import Listening
from app.api.openai.audio.timing import Timing
from app.api.openai.audio.transcript import Transcript
from app.api.openai.audio.turns import Turns
from app.config.limits import RequestLimits
from app.errors import UnsupportedError
from app.text.served_model import ServedModel
from app.text.speech import Speech

FormT = TypeVar("FormT", bound=SoundForm)
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
MAX_RUNNING = 64  # pieces of one request
PLAIN_TEXT = "text/plain; charset=utf-8"


def audio_routes(api: Api) -> APIRouter:
    """The endpoints of sound."""
    router = APIRouter(tags=["openai"])

    @router.post(TRANSCRIPTIONS, openapi_extra=form_description(TranscriptionForm, FILE))
    async def create_transcription(request: Request) -> Response:
        """Write down what is said in a sound, in its own language; `stream` makes it server-sent events."""
        timing = Timing()
        form, data = await _read(request, api, TranscriptionForm)
        model, speech = _model(api.client, form)
        language = speech.language(form.language)
        ask = await _ask(request, form, model, speech, "transcribe")
        timing.mark("read")
        listening = await _listening(request, api.client, ask, data, timing, language, is_live=form.stream)
        work, has_logprobs = unwatched_work_of(request), bool(form.include)
        if form.stream:
            return EventStreamResponse(listening, TranscriptEvents(listening, work, has_logprobs))
        return await _whole(listening, work, form, with_logprobs=has_logprobs)

    @router.post(TRANSLATIONS, openapi_extra=form_description(TranslationForm, FILE))
    async def create_translation(request: Request) -> Response:
        """Write down in English what is said in a sound."""
        timing = Timing()
        form, data = await _read(request, api, TranslationForm)
        model, speech = _model(api.client, form)
        speech.check_task("translate")
        ask = await _ask(request, form, model, speech, "translate")
        timing.mark("read")
        listening = await _listening(request, api.client, ask, data, timing)
        return await _whole(listening, unwatched_work_of(request), form)

    return router


async def _read(request: Request, api: Api, form_type: type[FormT]) -> tuple[FormT, bytes]:
    """The fields and the file of a form. The file is in memory, and counts from before it comes."""
    check_origin(request, api.ingress.cors_origins)
    most, length = api.limits.max_sound_bytes, request.headers.get("content-length", "")
    holding_of(request.scope).add(int(length[:20]) if length.isdigit() else most)
    async with read_form(request, MAX_FIELDS, 4 * MAX_PROMPT_CHARS) as form:
        fields = fields_of(request, form, form_type, FILE)
        return fields, await uploaded(form, FILE, most).read()


def _model(client: EngineClient, form: SoundForm) -> tuple[ServedModel, Speech]:
    model = find_model(client, form.model)
    speech = model.speech or model.chat_speech
    if speech is None:
        raise UnsupportedError(f"the model {model.name!r} does not transcribe", param="model")
    if _has_words(form):
        speech.check_words()
    if form.is_timed:
        speech.check_times()
    return model, speech


async def _ask(request: Request, form: SoundForm, model: ServedModel, speech: Speech, task: str) -> Ask:
    text, seed = form.prompt or "", form.seed
    context = await work_of(request).run(TOKENISE_S_PER_CHAR * len(text), speech.context, text, model.tokenizer)
    return Ask(
        model,
        speech,
        task,
        form.placement(request, is_stream=isinstance(form, TranscriptionForm) and form.stream),
        f"transcript-{uuid.uuid4().hex}",
        context,
        form.is_timed,
        TEMPERATURES if form.temperature == 0 and speech.tells_silence else (form.temperature,),
        getattr(request.state, "seed", None) if seed is None else seed,
        form.response_format == "verbose_json",
        _has_words(form),
    )


def _has_words(form: SoundForm) -> bool:
    return isinstance(form, TranscriptionForm) and form.has_words


async def _listening(
    request: Request,
    client: EngineClient,
    ask: Ask,
    data: bytes,
    timing: Timing,
    language: str | None = None,
    *,
    is_live: bool = False,
) -> Listening:
    work = unwatched_work_of(request)
    each = ask.speech.num_bytes + (ask.speech.alignment_bytes if ask.has_words else 0)
    turns = Turns(min(MAX_RUNNING, ask.model.max_running), work.holding, each)
    incoming = Incoming(work, ask.speech, data, FILE, turns)
    await incoming.hold()
    return Listening(client, work, request.receive, ask, incoming, language, timing, is_live)


async def _whole(listening: Listening, work: RequestWork, form: SoundForm, *, with_logprobs: bool = False) -> Response:
    async with listening:
        while await listening.next_batch():
            pass
    listening.timing.mark("hear")
    transcript = Transcript(listening.ask, listening.heard, listening.language, listening.seconds)
    replica = listening.route.replica_id
    headers = {"X-Manta-Replica": replica} if replica else {}
    answer = await work.run_later(transcript.writing_cost_s, _written, transcript, form, headers, with_logprobs)
    listening.timing.mark("write")
    answer.headers.update(listening.timing.headers())
    return answer


def _written(transcript: Transcript, form: SoundForm, headers: dict[str, str], with_logprobs: bool) -> Response:
    if form.response_format == "json":
        return json_response(transcript.json(with_logprobs), headers)
    if form.response_format == "verbose_json":
        has_segments = not isinstance(form, TranscriptionForm) or form.has_segments
        return json_response(transcript.verbose_json(has_segments), headers)
    return Response(transcript.plain(form.response_format), headers=headers, media_type=PLAIN_TEXT)


def _bounds(limits: RequestLimits) -> dict[str, int]:
    """Returns how large the bodies of both routes may be."""
    return dict.fromkeys((TRANSCRIPTIONS, TRANSLATIONS), limits.max_sound_bytes + FORM_BYTES)


ENDPOINT = Endpoint(
    audio_routes,
    (TranscriptionForm, TranslationForm),
    generating=(TRANSCRIPTIONS, TRANSLATIONS),
    uploads=_bounds,
)
