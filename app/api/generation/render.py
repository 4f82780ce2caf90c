"""From a validated body to EngineRequests: what every dialect asks of the ingress before tokens leave it (I4, I6).

Resolves the model, tokenises, checks limits and lengths, fills in what the client left open (seed, max_tokens, the
model's own sampling defaults) and turns text options into token ids.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from app.api.generation.answer_start import PLAIN, AnswerStart
from app.api.generation.request_builder import OWN_NAMES, RequestBuilder
from app.api.http.errors import validation_error
from app.api.http.work_pool import DECODE_S_PER_TOKEN, TOKENISE_S_PER_CHAR, RequestWork
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, ModelNotFoundError, PromptTooLongError, UnsupportedError
from app.records.request import ANYWHERE, EngineRequest, Placement
from app.records.sampling_params import SamplingParams
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel
from app.text.tokenizer import Tokenizer

ModelT = TypeVar("ModelT")
ModelT_co = TypeVar("ModelT_co", covariant=True)
MAX_SHOWN_CHARS = 256  # of a model's name that nobody knows
_TOKEN_ID_FIELDS = ("logit_bias", "stop_token_ids")


@dataclass(slots=True, frozen=True)
class Prompt:
    """One prompt, tokenised. `text` is what the client wrote or the template rendered; None for token-id prompts.
    `asks` is what it brings for single features: records of what its pictures are, where it shows any."""

    token_ids: list[int]
    text: str | None = None
    asks: tuple[object, ...] = ()


class Serving(Protocol[ModelT_co]):
    """Whoever has models."""

    @property
    def models(self) -> Mapping[str, ModelT_co]:
        """The models by name and by alias, the default first."""


def find_model(client: Serving[ModelT], name: str | None) -> ModelT:
    """The model served under `name`; the first one when the client names none. ModelNotFoundError otherwise."""
    if name is None:
        return next(iter(client.models.values()))
    model = client.models.get(name)
    if model is None:
        raise ModelNotFoundError(f"the model {name[:MAX_SHOWN_CHARS]!r} does not exist", param="model")
    return model


def must_generate(model: ServedModel) -> None:
    """UnsupportedError when `model` gives embeddings or scores, and no text, or text of sounds alone."""
    if model.speech is not None:
        raise UnsupportedError(
            f"the model {model.name!r} writes down sounds, and nothing else; see /v1/audio/transcriptions",
            param="model",
        )
    if model.pooling is not None:
        raise UnsupportedError(
            f"the model {model.name!r} gives embeddings or scores and generates no text; see /v1/embeddings, /score, "
            "/rerank, /classify and /pooling",
            param="model",
        )


async def encode(
    work: RequestWork, tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool, room: TextRoom
) -> list[list[int]]:
    """Token ids of each text, without blocking the event loop. What `room` keeps of a long text is among them.

    PromptTooLongError when a text surely has more tokens than `room` takes.
    """

    def fit_and_encode() -> list[list[int]]:
        return tokenizer.encode_batch([room.fit(tokenizer, text) for text in texts], add_special_tokens)

    room.check(tokenizer, max(map(len, texts), default=0))
    return await work.run(TOKENISE_S_PER_CHAR * sum(map(len, texts)), fit_and_encode)


def check_total_chars(num_chars: int, limits: RequestLimits, field: str) -> None:
    """PromptTooLongError when the texts of one request have more characters than it may bring."""
    if num_chars > limits.max_prompt_chars:
        raise PromptTooLongError(
            f"the texts have {num_chars} characters together; at most {limits.max_prompt_chars}", param=field
        )


async def decode(work: RequestWork, tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Text of token ids, without blocking the event loop on many."""
    return await work.run(DECODE_S_PER_TOKEN * len(token_ids), tokenizer.decode, token_ids, skip_special_tokens)


def sampling_params(fields: Mapping[str, Any], model: ServedModel, given: Iterable[str]) -> SamplingParams:
    """SamplingParams from a body's fields; what the client has not `given` takes the model's own default."""
    own = model.info.sampling_defaults
    defaults = {name: value for name, value in own.items() if name not in set(given)}
    values = {**fields, **defaults}
    try:
        return SamplingParams.model_validate(values)
    except ValidationError as error:
        raise validation_error(error, values) from error


def prompt_room(
    model: ServedModel, field: str, limit: int | None = None, side: str = "left", max_tokens: int | None = None
) -> TextRoom:
    """Bounds a prompt, or says what is kept of a longer one: its last `limit` tokens, or its first where it is cut on
    the right; -1 means as many as leave room for `max_tokens`, at least for one."""
    bounds = model.bounds
    most, what, beside = bounds.max_total_tokens, bounds.holder, max_tokens or 1
    if bounds.encoder is not None and bounds.reads_text:
        most, what, beside = bounds.encoder.num_positions, "the model's encoder", 0
    if limit is None or limit > most:
        return TextRoom(most, what=what, field=field)
    if limit == -1:
        limit = max(1, most - beside)
    return TextRoom(limit, "first" if side == "right" else "last", what, field)


def counting_room(model: ServedModel, field: str) -> TextRoom:
    """Room for counting the tokens of a text: it may be somewhat too long for the model."""
    return TextRoom(2 * model.max_model_len, what="a count of at most twice the model's context", field=field)


def truncate(prompt: Prompt, room: TextRoom) -> Prompt:
    """Returns what `room` keeps of the prompt."""
    if room.keeps == "all" or len(prompt.token_ids) <= room.num_tokens:
        return prompt
    if prompt.asks:
        raise UnsupportedError("a prompt with pictures or sounds is not cut", param="truncate_prompt_tokens")
    kept = slice(0, room.num_tokens) if room.keeps == "first" else slice(-room.num_tokens, None)
    return Prompt(prompt.token_ids[kept], None)


def engine_requests(
    model: ServedModel,
    limits: RequestLimits,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    placement: Placement = ANYWHERE,
    *,
    request_id: str,
    names: Mapping[str, str] = OWN_NAMES,
    start: AnswerStart = PLAIN,
) -> list[EngineRequest]:
    """`n` requests for each prompt, in order, within the server's limits; see RequestBuilder.

    Raises InvalidRequestError or PromptTooLongError, naming the field.
    """
    check_limits(params, limits, names, model.info.vocab_size)
    check_number(len(prompts), params.n, limits, names)
    usual = model.info.generation_config.get("max_new_tokens")
    builder = RequestBuilder(
        model,
        params,
        placement,
        names=names,
        reasoning=start.reasoning,
        inside=start.inside,
        usual_max_tokens=usual,
    )
    return [
        one
        for i, prompt in enumerate(prompts)
        for one in builder.choices(f"{request_id}-{i}", prompt.token_ids, prompt.asks)
    ]


def check_limits(
    params: SamplingParams, limits: RequestLimits, names: Mapping[str, str] = OWN_NAMES, vocab_size: int = sys.maxsize
) -> None:
    """Refuse what exceeds the server's limits for one request. Logprobs of -1 are those of all the vocabulary."""
    if params.n > limits.max_n:
        field = names.get("n", "n")
        raise InvalidRequestError(f"{field}={params.n} is more than the {limits.max_n} choices allowed", param=field)
    if len(params.stop) > limits.max_stop:
        field = names.get("stop", "stop")
        raise InvalidRequestError(f"{len(params.stop)} stop strings; at most {limits.max_stop}", param=field)
    longest = max(map(len, params.stop), default=0)
    if longest > limits.max_stop_chars:
        what = f"a stop string of {longest} characters; at most {limits.max_stop_chars}"
        raise InvalidRequestError(what, param=names.get("stop", "stop"))
    counts = {"bad_words": limits.max_bad_words} | dict.fromkeys(_TOKEN_ID_FIELDS, limits.max_logit_bias)
    for name, most in counts.items():
        number = len(getattr(params, name) or ())
        if number > most:
            field = names.get(name, name)
            raise InvalidRequestError(f"{field} has {number} entries; at most {most}", param=field)
    num_chars = sum(map(len, params.bad_words))
    if num_chars > limits.max_bad_words_chars:
        field, what = names.get("bad_words", "bad_words"), f"{num_chars} characters in all"
        raise InvalidRequestError(f"{field} has {what}; at most {limits.max_bad_words_chars}", param=field)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and (vocab_size if wanted == -1 else wanted) > limits.max_logprobs:
            field = names.get(name, name)
            raise InvalidRequestError(f"{field}={wanted}: at most {limits.max_logprobs} a token", param=field)


def check_number(num_prompts: int, n: int, limits: RequestLimits, names: Mapping[str, str]) -> None:
    """Each choice is a request of its own to the engine: more than may be in flight here could never be served."""
    most, field = min(limits.max_choices, limits.max_waiting_requests), names.get("n", "n")
    if num_prompts * n > most:
        raise InvalidRequestError(
            f"{num_prompts} prompts with {field}={n} are {num_prompts * n} choices; at most {most} in one request",
            param=field if num_prompts <= most else names.get("prompt", "prompt"),
        )
