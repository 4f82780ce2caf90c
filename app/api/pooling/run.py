"""From prompts to their results: checks, requests of many prompts each, some at once, in the order of the prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from app.api.chat.media import read_media
from app.api.chat.media_parts import ImagePart
from app.api.chat.messages import ChatMessage, ChatOptions
from app.api.chat.prompt import render_chat
from app.api.engine_client import EngineClient, RouteInfo
from app.api.generation.render import check_total_chars, encode
from app.api.generation.request_builder import pooling_request
from app.api.http.errors import ClientDisconnected
from app.api.http.work_pool import TOKENISE_S_PER_CHAR, RequestWork
from app.api.pooling.protocol import InputBody, PooledBody, PoolingBody, ScoredText
from app.config.limits import RequestLimits
from app.errors import EngineDeadError, InvalidRequestError, MantaError, UnsupportedError
from app.media.picture import Picture
from app.media.reader import in_field
from app.records.bundle import bundled
from app.records.late_interaction import LateInteraction, Role
from app.records.media import MediaAsk, media_of
from app.records.outputs import PooledResult
from app.records.pooling_info import PoolingInfo
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.text.late_prompts import late_prompts, picture_prompt
from app.text.pair_prompt import SeenText, seen_pair
from app.text.pair_template import PairTemplate
from app.text.placeholders import picture_alone
from app.text.pooling_prompt import PoolingPrompt, TextPair, pooling_prompts, templated_prompts, without_prompt
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel
from app.text.tokenizer import Tokenizer

INPUT: Mapping[str, str] = {"prompt": "input"}
# Most of one bundle: what shares its way costs each text little, and fairness and replicas want pieces.
MAX_BUNDLE_PROMPTS, MAX_BUNDLE_TOKENS = 256, 8192
TOKEN_BYTES = 8  # in a prompt's list
SHOW_S_PER_TOKEN = 3e-8  # of a core, to write a picture's token into a prompt


def pooling_of(model: ServedModel) -> PoolingInfo:
    """Returns how the model pools; UnsupportedError when it generates text instead."""
    if model.pooling is None:
        raise UnsupportedError(
            f"the model {model.name!r} generates text and gives no embeddings or scores; a model for them is served "
            "with `runner: pooling`",
            param="model",
        )
    return model.pooling


def pooled_room(body: PoolingBody, model: ServedModel, field: str) -> TextRoom:
    """The tokens that a prompt is cut to, at its end, or above which it is refused."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return TextRoom(model.bounds.max_total_tokens, field=field)
    return TextRoom(model.max_model_len if wanted == -1 else min(wanted, model.max_model_len), "first", field=field)


async def tokenise(
    work: RequestWork,
    model: ServedModel,
    pairs: Sequence[TextPair],
    room: TextRoom,
    last_limit: int | None = None,
    template: PairTemplate | None = None,
) -> list[PoolingPrompt]:
    """`pooling_prompts` of what `room` takes of each text, or `templated_prompts`, without blocking the event loop."""
    distinct = {text for pair in pairs for text in pair if text is not None}
    room.check(model.tokenizer, max(map(len, distinct), default=0))
    cost_s = TOKENISE_S_PER_CHAR * sum(map(len, distinct))
    return await work.run(cost_s, _fit_and_tokenise, model.tokenizer, pairs, room, last_limit, template)


def _fit_and_tokenise(
    tokenizer: Tokenizer,
    pairs: Sequence[TextPair],
    room: TextRoom,
    last_limit: int | None,
    template: PairTemplate | None,
) -> list[PoolingPrompt]:
    fitting = {text: room.fit(tokenizer, text) for pair in pairs for text in pair if text is not None}
    kept = [(fitting[first], None if second is None else fitting[second]) for first, second in pairs]
    limit = None if room.keeps == "all" else room.num_tokens
    keeps_end = room.keeps == "last"
    if template is not None:
        return templated_prompts(tokenizer, template, kept, limit, last_limit, keeps_end=keeps_end)
    return pooling_prompts(tokenizer, kept, limit, last_limit, keeps_end=keeps_end)


async def tokenise_late(
    work: RequestWork,
    model: ServedModel,
    late: LateInteraction,
    texts: Sequence[str],
    room: TextRoom,
    role: Role,
    max_text_tokens: int | None = None,
) -> list[PoolingPrompt]:
    """`late_prompts` of what `room` and the model's own lengths take of each text."""
    own = late.limit(role)
    if own is not None:
        room = replace(room, num_tokens=min(own, room.num_tokens), keeps="first")
    cost_s = TOKENISE_S_PER_CHAR * sum(map(len, texts))
    return await work.run(cost_s, _fit_late, model.tokenizer, late, texts, room, role, max_text_tokens)


def _fit_late(
    tokenizer: Tokenizer,
    late: LateInteraction,
    texts: Sequence[str],
    room: TextRoom,
    role: Role,
    max_text_tokens: int | None,
) -> list[PoolingPrompt]:
    fitting = [room.fit(tokenizer, text) for text in texts]
    limit = None if room.keeps == "all" else room.num_tokens
    return late_prompts(tokenizer, late, fitting, role, limit, max_text_tokens)


async def read_inputs(
    work: RequestWork, body: InputBody, model: ServedModel, limits: RequestLimits
) -> list[PoolingPrompt]:
    """The prompts of a body, whichever form they were sent in."""
    room = pooled_room(body, model, "messages" if body.messages is not None else "input")
    prompt = body.prompt(pooling_of(model).prompts)
    if body.messages is not None and model.media is not None and _is_alone(model):
        return await _alone(work, model, body, body.messages, limits, room)
    if body.messages is not None:
        options = ChatOptions(
            messages=body.messages,
            tools=None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=False,
            add_special_tokens=body.add_special_tokens,
            documents=None,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        rendered = await render_chat(work, model, options, limits, room)
        return [_shown(rendered.token_ids, rendered.asks, room)]
    given = body.inputs()
    if not given:
        raise InvalidRequestError("the list of inputs is empty", param="input")
    if len(given) > limits.max_prompts:
        raise InvalidRequestError(f"{len(given)} inputs; at most {limits.max_prompts}", param="input")
    texts = [prompt + text for text in given if isinstance(text, str)]
    if not texts:
        return [_cut(ids, room) for ids in given if not isinstance(ids, str)]
    check_total_chars(sum(map(len, texts)), limits, "input")
    if (late := pooling_of(model).late) is not None:
        return await tokenise_late(work, model, late, texts, room, body.role())
    if body.add_special_tokens:
        made = await tokenise(work, model, [(text, None) for text in texts], room)
        return prompted(model, prompt, made, room.field)
    bare = [_cut(ids, room) for ids in await encode(work, model.tokenizer, texts, False, room)]
    return prompted(model, prompt, bare, room.field, is_bare=True)


def prompted(
    model: ServedModel, prompt: str, made: list[PoolingPrompt], field: str, *, is_bare: bool = False
) -> list[PoolingPrompt]:
    """Prompts of texts that begin with a prompt, of which a model may skip the tokens."""
    if not pooling_of(model).skips_prompt:
        return made
    return without_prompt(model.tokenizer, prompt, made, field, is_bare=is_bare)


def _cut(token_ids: list[int], room: TextRoom) -> PoolingPrompt:
    return PoolingPrompt(token_ids if room.keeps == "all" else token_ids[: room.num_tokens])


def _is_alone(model: ServedModel) -> bool:
    """True if the model has no conversations: a prompt is a text or a picture."""
    late = pooling_of(model).late
    return late is not None or (model.media is not None and model.media.info.is_alone)


async def _alone(
    work: RequestWork,
    model: ServedModel,
    body: InputBody,
    messages: Sequence[ChatMessage],
    limits: RequestLimits,
    room: TextRoom,
) -> list[PoolingPrompt]:
    """A message to a model that has no conversations."""
    _refuse_template(body)
    if [message.role for message in messages] != ["user"]:
        what = "the model has no conversations: a prompt is one message, of the user"
        raise InvalidRequestError(f"messages: {what}", param="messages")
    (message,) = messages
    asked = message.media("messages.0")
    if asked:
        _refuse_cut(room)
    pictures = await read_media(work, model, asked, limits, room) if asked else []
    text, late = message.text(), pooling_of(model).late
    assert model.media is not None
    if late is not None and pictures:
        ids, asks = picture_prompt(model.tokenizer, late, model.media, pictures, text, "messages")
        return [PoolingPrompt(ids, asks=asks)]
    if late is not None:
        return await tokenise_late(work, model, late, [text], room, "document")
    if not pictures:
        return await tokenise(work, model, [(text, None)], room)
    ids, ask = picture_alone(model.media, pictures, text, "messages")
    return [PoolingPrompt(ids, asks=(ask,))]


async def read_page(
    work: RequestWork,
    model: ServedModel,
    late: LateInteraction,
    part: ImagePart,
    limits: RequestLimits,
    room: TextRoom,
) -> PoolingPrompt:
    """The prompt of one page's picture."""
    _refuse_cut(room)
    field = part.field("")
    pictures = await read_media(work, model, [(field, part)], limits, room)
    assert model.media is not None
    ids, asks = picture_prompt(model.tokenizer, late, model.media, pictures, "", field)
    return PoolingPrompt(ids, asks=asks)


async def read_pairs(
    work: RequestWork,
    model: ServedModel,
    template: PairTemplate | None,
    pairs: Sequence[tuple[ScoredText, ScoredText]],
    limits: RequestLimits,
    room: TextRoom,
) -> list[PoolingPrompt]:
    """The prompts of pairs with pictures, each of which is read once."""
    _refuse_cut(room)
    parts = {one.image.url: one.image for pair in pairs for one in pair if one.image is not None}
    shown = {url: await read_media(work, model, [(part.field(""), part)], limits, room) for url, part in parts.items()}
    assert model.media is not None
    room.check(model.tokenizer, max(len(first.text) + len(second.text) for first, second in pairs))
    _check_values(pairs, shown, model.media.reader.config.max_prompt_bytes)
    num_tokens = _hold_tokens(work, pairs, parts, shown)
    around = 0 if template is None else len(template.text("", ""))
    num_chars = sum(around + len(first.text) + len(second.text) for first, second in pairs)
    cost_s = TOKENISE_S_PER_CHAR * num_chars + SHOW_S_PER_TOKEN * num_tokens
    return await work.run(cost_s, _seen_pairs, model, template, pairs, shown, room)


def _check_values(
    pairs: Sequence[tuple[ScoredText, ScoredText]], shown: Mapping[str, Sequence[Picture]], most: int
) -> None:
    """InvalidRequestError names a picture that is too much beside the other one of its pair: both are one prompt's."""
    for pair in pairs:
        images = [one.image for one in pair if one.image is not None]
        num_bytes = sum(len(picture.pixels) for image in images for picture in shown[image.url])
        if num_bytes > most:
            field = images[-1].field("")
            what = f"has {num_bytes} bytes of pixels with the query's; a prompt may have {most}: send smaller ones"
            raise InvalidRequestError(f"{field}: {what}", param=field)


def _hold_tokens(
    work: RequestWork,
    pairs: Sequence[tuple[ScoredText, ScoredText]],
    parts: Mapping[str, ImagePart],
    shown: Mapping[str, Sequence[Picture]],
) -> int:
    """Tokens of pictures in all prompts, which hold them as often as pairs show them; see Holding.add_picture."""
    uses = Counter(one.image.url for pair in pairs for one in pair if one.image is not None)
    found = 0
    for url, part in parts.items():
        num_tokens = uses[url] * sum(picture.layout.num_tokens for picture in shown[url])
        with in_field(part.field("")):
            work.holding.add_picture(TOKEN_BYTES * num_tokens)
        found += num_tokens
    return found


def _seen_pairs(
    model: ServedModel,
    template: PairTemplate | None,
    pairs: Sequence[tuple[ScoredText, ScoredText]],
    shown: Mapping[str, Sequence[Picture]],
    room: TextRoom,
) -> list[PoolingPrompt]:
    assert model.media is not None
    sides = [
        tuple(SeenText(one.text, () if one.image is None else shown[one.image.url]) for one in pair) for pair in pairs
    ]
    return [seen_pair(model.tokenizer, template, model.media, (first, second), room) for first, second in sides]


def _refuse_template(body: InputBody) -> None:
    """UnsupportedError names an option of chat templates, where the model has none."""
    given = {
        "add_generation_prompt": body.add_generation_prompt,
        "chat_template_kwargs": body.chat_template_kwargs is not None,
        "add_special_tokens": "add_special_tokens" in body.model_fields_set,
    }
    for name, is_given in given.items():
        if is_given:
            raise UnsupportedError("this model's messages go through no chat template", param=name)


def _refuse_cut(room: TextRoom) -> None:
    if room.keeps != "all":
        raise InvalidRequestError("a picture is not cut", param="truncate_prompt_tokens")


def _shown(token_ids: list[int], asks: tuple[object, ...], room: TextRoom) -> PoolingPrompt:
    """A conversation's prompt; what lies behind the tokens that it is cut to is not shown."""
    cut = _cut(token_ids, room)
    media = media_of(asks)
    if media is None:
        return cut
    kept = [item for item in media.items if item.end <= len(cut.token_ids)]
    if len(kept) < len(media.items) and media.items[len(kept)].offset < len(cut.token_ids):
        what = f"{room.num_tokens} tokens end within a picture"
        raise InvalidRequestError(what, param="truncate_prompt_tokens")
    return PoolingPrompt(cut.token_ids, asks=(MediaAsk(tuple(kept)),) if kept else ())


async def pool(
    client: EngineClient,
    request: Request,
    body: PooledBody,
    model: ServedModel,
    prompts: Sequence[PoolingPrompt],
    params: PoolingParams,
    *,
    request_id: str,
    names: Mapping[str, str] = INPUT,
) -> list[PooledResult]:
    """A result for each prompt. `names` says what the dialect calls fields of ours.

    Raises InvalidRequestError, PromptTooLongError and UnsupportedError before anything runs, then what the engine
    raises; ClientDisconnected when nobody waits any more. In each case, what still runs is aborted.
    """
    if body.request_id is not None:
        request.state.request_id = body.request_id
    placement = body.placement(request)
    requests = [
        pooling_request(model, f"{request_id}-{i}", prompt, params, placement, names=names)
        for i, prompt in enumerate(prompts)
    ]
    found = await _gather(client, request, model, _bundles(model, requests))
    return [
        result if prompt.kept is None else PooledResult.of(prompt.counted(result.array()))
        for result, prompt in zip(found, prompts, strict=True)
    ]


def _bundles(model: ServedModel, requests: list[EngineRequest]) -> list[EngineRequest]:
    """The same in few requests, each of what an engine computes in a step or two, so that replicas share a body.

    One that brings something of its own, as a picture, goes alone.
    """
    most = min(MAX_BUNDLE_PROMPTS, max(1, model.max_running_of_prompt // 2))
    bundles: list[list[EngineRequest]] = [[]]
    num_tokens = 0
    for one in requests:
        own, is_alone = len(one.prompt_token_ids), any(ask is not model.adapter for ask in one.asks)
        is_full = is_alone or len(bundles[-1]) == most or num_tokens + own > MAX_BUNDLE_TOKENS
        if bundles[-1] and (is_full or _skipped(bundles[-1][0]) != _skipped(one)):
            bundles.append([])
            num_tokens = 0
        bundles[-1].append(one)
        num_tokens += MAX_BUNDLE_TOKENS if is_alone else own
    return [bundled(bundle) for bundle in bundles]


def _skipped(request: EngineRequest) -> int | None:
    """Tokens that count for nothing: the same of all prompts of a bundle."""
    return None if request.pooling is None else request.pooling.num_skipped


async def _gather(
    client: EngineClient, request: Request, model: ServedModel, requests: list[EngineRequest]
) -> list[PooledResult]:
    """Run all, as many at a time as leave room to others; the first failure ends what is left."""
    waiting = deque(requests)
    running: dict[asyncio.Task[list[PooledResult]], int] = {}  # with their numbers of prompts
    tasks: list[asyncio.Task[list[PooledResult]]] = []
    watcher = asyncio.create_task(_watch_client(request))
    try:
        while waiting or running:
            while waiting and (not running or sum(running.values()) + waiting[0].num_prompts <= model.max_running):
                one = waiting.popleft()
                tasks.append(asyncio.create_task(_run(client, model, one)))
                running[tasks[-1]] = one.num_prompts
            pending: set[asyncio.Task[Any]] = {*running, watcher}
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what it raised
            running = {task: number for task, number in running.items() if task not in done}
        return [result for task in tasks for result in task.result()]
    finally:
        for task in (*tasks, watcher):
            task.cancel()
        await asyncio.gather(*tasks, watcher, return_exceptions=True)


async def _run(client: EngineClient, model: ServedModel, request: EngineRequest) -> list[PooledResult]:
    outputs = client.generate(model.name, request, RouteInfo())
    try:
        async for output in outputs:
            if output.finish_reason == "error":
                raise output.as_error()
            if output.bundled is not None:
                return output.bundled
            if output.pooled is not None:
                return [output.pooled]
        raise EngineDeadError("the engine ended the request without a result")
    finally:
        close = getattr(outputs, "aclose", None)
        if close is not None:
            with contextlib.suppress(MantaError):
                await close()


async def _watch_client(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnected
