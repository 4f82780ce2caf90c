"""From bodies to EngineRequests: what the HTTP tests do not see."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from app.api.generation.placement import cache_root
from app.api.generation.render import Prompt, decode, encode, engine_requests, prompt_room, truncate
from app.api.http.work_pool import INLINE_S, TOKENISE_S_PER_CHAR, RequestWork, WorkPool
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from app.records.request import Placement
from app.records.sampling_params import SamplingParams
from app.text.prompt_size import TextRoom

INLINE_CHARS = int(INLINE_S / TOKENISE_S_PER_CHAR)
ROOM = TextRoom(1 << 20)
LONG = "The quick brown fox jumps over the lazy dog, 東京. " * 8_000


def test_long_texts_do_not_block_the_event_loop(served_model: Any) -> None:
    served_model.tokenizer.encode("warm")

    async def run() -> int:
        beats, running = 0, True

        async def heart() -> None:
            nonlocal beats
            while running:
                await asyncio.sleep(0.002)
                beats += 1

        task = asyncio.create_task(heart())
        work = RequestWork(WorkPool())
        [ids] = await encode(work, served_model.tokenizer, [longest], add_special_tokens=True, room=ROOM)
        text = await decode(work, served_model.tokenizer, ids, skip_special_tokens=True)
        running = False
        await task
        assert text == longest
        return beats

    longest = 4 * LONG  # 0.4 s
    assert asyncio.run(run()) > 20, "calls that hold the interpreter lock leave about one beat each"


def test_short_texts_stay_on_the_loop(served_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    original = served_model.tokenizer.encode_batch

    def recording(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return original(*args, **kwargs)

    monkeypatch.setattr(served_model.tokenizer, "encode_batch", recording)
    work = RequestWork(WorkPool())
    asyncio.run(encode(work, served_model.tokenizer, ["short"], True, ROOM))
    asyncio.run(encode(work, served_model.tokenizer, ["a", "b"], True, ROOM))
    assert threads == [threading.main_thread()] * 2
    asyncio.run(encode(work, served_model.tokenizer, ["x" * (INLINE_CHARS + 1)], True, ROOM))
    assert threads[-1] is not threading.main_thread()


def test_lists_of_texts(served_model: Any) -> None:
    tokenizer = served_model.tokenizer
    work = RequestWork(WorkPool())
    for texts in (["a fox", "b"], ["x" * INLINE_CHARS, "the fox"]):
        assert asyncio.run(encode(work, tokenizer, texts, True, ROOM)) == [tokenizer.encode(text) for text in texts]


def requests_for(model: Any, prompts: list[Prompt], salt: str | None = None, **params: Any) -> Any:
    options = SamplingParams(**params)
    placement = Placement(cache_root=cache_root("", salt))
    return engine_requests(model, RequestLimits(), prompts, options, placement, request_id="r")


def test_one_request_for_each_choice(served_model: Any) -> None:
    requests = requests_for(served_model, [Prompt([50, 51]), Prompt([60])], n=2, max_tokens=5)
    assert [(r.request_id, r.choice_index, r.prompt_token_ids) for r in requests] == [
        ("r-0-0", 0, [50, 51]),
        ("r-0-1", 1, [50, 51]),
        ("r-1-0", 0, [60]),
        ("r-1-1", 1, [60]),
    ]
    assert all(0 <= r.sampling.seed < 1 << 63 for r in requests)
    assert {r.sampling.seed for r in requests_for(served_model, [Prompt([50])] * 2, seed=3)} == {3}


def test_more_choices_than_may_ever_be_in_flight_are_refused(served_model: Any) -> None:
    limits = RequestLimits(max_waiting_requests=6)

    def ask(num_prompts: int, n: int) -> int:
        params = SamplingParams(n=n, max_tokens=1)
        return len(engine_requests(served_model, limits, [Prompt([50])] * num_prompts, params, request_id="r"))

    assert ask(3, 2) == 6
    for num_prompts, n, field in ((7, 1, "prompt"), (1, 7, "n"), (4, 2, "n")):
        with pytest.raises(InvalidRequestError, match=f"{num_prompts * n} choices; at most 6") as caught:
            ask(num_prompts, n)
        assert caught.value.param == field


def test_the_salt_makes_the_cache_root(served_model: Any) -> None:
    roots = [requests_for(served_model, [Prompt([50])], salt)[0].placement.cache_root for salt in (None, "a", "a", "b")]
    assert roots[0] == b""
    assert roots[1] == roots[2]
    assert len(set(roots)) == 3


def test_max_tokens_is_the_room_that_is_left(served_model: Any) -> None:
    first, second = requests_for(served_model, [Prompt([50] * 500), Prompt([50] * 10)])
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (12, 502)


def test_truncation_keeps_the_end(served_model: Any) -> None:
    prompt = Prompt(list(range(600)), "text")

    def kept(*options: Any) -> Prompt:
        return truncate(prompt, prompt_room(served_model, "prompt", *options))

    assert kept(3).token_ids == [597, 598, 599]
    assert kept(3, "right").token_ids == [0, 1, 2]
    assert len(kept(-1).token_ids) == 511
    assert kept(-1, "left", 16).token_ids == prompt.token_ids[-496:], "room for max_tokens"
    assert len(kept(-1, "left", 10_000).token_ids) == 1, "what is asked for is too much, and will be refused"
    assert kept(None) is prompt
    assert kept(600) is prompt


def test_prompt_ids_must_be_the_model_s(served_model: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        requests_for(served_model, [Prompt([50]), Prompt([-1])])
    assert caught.value.param == "prompt"
