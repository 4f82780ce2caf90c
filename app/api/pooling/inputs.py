"""Reading a body of inputs into prompts: texts, tokens, a conversation, or one message of text and pictures."""

from __future__ import annotations

from collections.abc import Sequence

from app.api.chat.media import read_media
from app.api.chat.messages import ChatMessage, ChatOptions
from app.api.chat.prompt import render_chat
from app.api.generation.render import check_total_chars, encode
from app.api.http.work_pool import RequestWork
from app.api.pooling.pictures import refuse_cut
from app.api.pooling.protocol import InputBody
from app.api.pooling.texts import pooled_room, pooling_of, prompted, tokenise, tokenise_late
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError
from app.records.media import MediaAsk, media_of
from app.text.late_prompts import picture_prompt
from app.text.placeholders import picture_alone
from app.text.pooling_prompt import PoolingPrompt
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel


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
        refuse_cut(room)
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
