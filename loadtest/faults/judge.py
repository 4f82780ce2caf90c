"""Holds what a client got against the answer of an undisturbed run."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from loadtest.faults.answer import Answer
from loadtest.faults.reply import Reply, is_readable

Kind = Literal[
    "ok",  # whole, and every token as it would have been
    "error",  # an error that says so: a refusal, or an error event in the stream
    "unreadable",  # a refusal that is no error object (a page of the proxy's, say)
    "lost",  # the connection broke, which the client's HTTP library reports
    "cut",  # the body ended as if it were whole, without its end: nobody would notice
    "wrong",  # a token that is wrong, doubled or missing, or an event that its dialect does not allow
    "hung",  # nothing more came
]
KINDS: tuple[Kind, ...] = ("ok", "error", "unreadable", "lost", "cut", "wrong", "hung")
NEVER: tuple[Kind, ...] = ("cut", "wrong", "hung")

_LOGPROB_TOLERANCE = 1e-4
_RANK_TOLERANCE = 2  # of a token: rounding swaps unlikely neighbours where a prompt is computed in other chunks
_SHOWN = 40  # characters around a difference


@dataclass(frozen=True, slots=True)
class Verdict:
    """One reply's."""

    kind: Kind
    why: str = ""


Equal = Callable[[Any, Any], bool]


def judge(reply: Reply, golden: Answer, *, is_exact: bool = False) -> Verdict:
    """The worst that can be said of the reply. `is_exact`: of a server whose logits are the same to the bit whatever
    runs beside a request (`deterministic`), so that nothing may differ by rounding."""
    if difference := _difference(reply.answer, golden, operator.eq if is_exact else _equal):
        return Verdict("wrong", difference)
    if reply.end == "hung":
        return Verdict("hung", f"{len(reply.times)} events, then nothing")
    if reply.end == "lost":
        return Verdict("lost", reply.broke)
    if reply.status != 200:
        return Verdict(
            "error" if is_readable(reply.refusal) else "unreadable", f"{reply.status}: {reply.refusal[:160]}"
        )
    if reply.answer.error is not None:
        return Verdict("error", reply.answer.error)
    return Verdict("ok") if reply.answer.is_whole else Verdict("cut", f"ended after {len(reply.times)} events")


def _difference(answer: Answer, golden: Answer, equal: Equal) -> str:
    """The first; empty when the answer equals the golden one, or is a beginning of it and not whole."""
    if answer.faults:
        return answer.faults[0]
    for name in answer.texts.keys() | golden.texts.keys():
        if fault := _text(answer.texts.get(name, ""), golden.texts.get(name, ""), answer.is_whole):
            return f"{name}: {fault}"
    for name in answer.lists.keys() | golden.lists.keys():
        if fault := _list(answer.lists.get(name, []), golden.lists.get(name, []), answer.is_whole, equal):
            return f"{name}: {fault}"
    names = answer.ends.keys() | golden.ends.keys() if answer.is_whole else answer.ends.keys()
    for name in names:
        if not equal(answer.ends.get(name), golden.ends.get(name)):
            return f"{name}{_where(answer.ends.get(name), golden.ends.get(name), equal)}"
    return ""


def _where(value: Any, golden: Any, equal: Equal) -> str:
    """The path to the first difference within two values that are not equal, and what is there."""
    if isinstance(value, dict) and isinstance(golden, dict) and value.keys() == golden.keys():
        name = next(name for name in value if not equal(value[name], golden[name]))
        return f".{name}{_where(value[name], golden[name], equal)}"
    if isinstance(value, list) and isinstance(golden, list) and len(value) == len(golden):
        at = next(at for at, (one, other) in enumerate(zip(value, golden, strict=True)) if not equal(one, other))
        return f"[{at}]{_where(value[at], golden[at], equal)}"
    if isinstance(value, str) and isinstance(golden, str):
        return f": {_text(value, golden, is_whole=True)}"
    return f": {_short(value)} for {_short(golden)}"


def _text(text: str, golden: str, is_whole: bool) -> str:
    if text == golden or (not is_whole and golden.startswith(text)):
        return ""
    at = next((i for i, (a, b) in enumerate(zip(text, golden, strict=False)) if a != b), min(len(text), len(golden)))
    return f"at character {at} of {len(golden)}: {text[at : at + _SHOWN]!r} for {golden[at : at + _SHOWN]!r}"


def _list(items: list[Any], golden: list[Any], is_whole: bool, equal: Equal) -> str:
    for at, (item, expected) in enumerate(zip(items, golden, strict=False)):
        if not equal(item, expected):
            return f"item {at} of {len(golden)}: {_short(item)} for {_short(expected)}"
    if len(items) > len(golden) or (is_whole and len(items) < len(golden)):
        return f"{len(items)} items for {len(golden)}"
    return ""


def _equal(value: Any, golden: Any) -> bool:
    """Equal, but for the rounding of logprobs, and what it does to ranks."""
    if isinstance(value, float) and isinstance(golden, int | float):
        return math.isclose(value, golden, rel_tol=_LOGPROB_TOLERANCE, abs_tol=_LOGPROB_TOLERANCE)
    if isinstance(value, dict) and isinstance(golden, dict):
        return value.keys() == golden.keys() and all(
            _equal(value[name], golden[name]) or (name == "rank" and _is_near(value[name], golden[name]))
            for name in value
        )
    if isinstance(value, list) and isinstance(golden, list):
        return len(value) == len(golden) and all(map(_equal, value, golden))
    return bool(value == golden)


def _is_near(rank: Any, golden: Any) -> bool:
    """Whether both are ranks behind the first, next to one another."""
    both = isinstance(rank, int) and isinstance(golden, int)
    return both and min(rank, golden) > 1 and abs(rank - golden) <= _RANK_TOLERANCE


def _short(value: Any) -> str:
    return json.dumps(value)[: 3 * _SHOWN]
