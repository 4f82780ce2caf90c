# ruff: noqa: E501, D101, D103, SIM113, SIM905 (tables of wordings)
"""The generated conversations, one function per family.

Every function takes (rng, h). `h` True draws content from the held-out part, False from the training part; the parts are
disjoint by a hash of the content (operands, words, names, schemas, tool names), see `words.held`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import words as W
from .words import city, held, name, number, pseudo, word

Message = dict[str, Any]
Rng = random.Random


@dataclass
class Ex:
    turns: list[Message]
    check: str = "exact"
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    solo: bool = False
    expected: Any = None
    thought: str | None = None  # how a thinking answer works it out
    extra: dict[str, Any] = field(default_factory=dict)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def bot(text: str) -> Message:
    return {"role": "assistant", "content": text}


def ask(rng: Rng, text: str) -> str:
    """The same question as people type it."""
    r = rng.random()
    if r < 0.06:
        text = (
            rng.choice(("Please ", "please ", "Hey, ", "Hi, ", "Hello! ", "OK, ", "Now ", "Next: ", "Can you help? "))
            + text
        )
    elif r < 0.12 and text[-1] not in '?!:"':
        text += rng.choice((" please", ", please.", " Thanks!", " Thank you."))
    if rng.random() < 0.12 and text[:1].isupper() and text[1:2].islower():
        text = text[0].lower() + text[1:]
    if rng.random() < 0.12 and text[-1] in "?.":
        text = text[:-1]
    return text


_AN = re.compile(
    r"\b([Aa]) (?=(?:"
    + "|".join(w for w in W.ANIMALS + W.OBJECTS + W.NATURE + W.ADJECTIVES if w[0] in "aeio")
    + r")\b)"
)


def an(text: str) -> str:
    return _AN.sub(r"\1n ", text)


def qa(rng: Rng, question: str, answer: str, thought: str | None = None, check: str = "exact", **kw: Any) -> Ex:
    return Ex([user(an(ask(rng, question))), bot(an(answer))], check=check, thought=thought, **kw)


# ---------------------------------------------------------------- arithmetic


def _operand(rng: Rng) -> int:
    d = rng.random()
    return rng.randrange(10) if d < 0.1 else rng.randrange(100) if d < 0.5 else rng.randrange(1000)


def _pair(rng: Rng, h: bool, tag: str, draw: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    while True:
        a, b = draw()
        if held(f"{tag}:{min(a, b)}:{max(a, b)}") == h:
            return a, b


def add_steps(a: int, b: int) -> str:
    out, carry, place = [], 0, 0
    x, y = str(a)[::-1], str(b)[::-1]
    for i in range(max(len(x), len(y))):
        p, q = int(x[i]) if i < len(x) else 0, int(y[i]) if i < len(y) else 0
        s = p + q + carry
        out.append(
            f"{p} + {q}" + (f" + {carry}" if carry else "") + f" = {s}, write {s % 10}" + (", carry 1" if s > 9 else "")
        )
        carry = s // 10
        place += 1
    if carry:
        out.append("write the carried 1")
    return "\n".join(out) + f"\n{a} + {b} = {a + b}"


def _only(rng: Rng, q: str, full: str, bare: str) -> tuple[str, str]:
    if rng.random() < 0.15:
        return q + rng.choice(
            (
                " Answer with only the number.",
                " Only the number.",
                " Just the number, please.",
                " Reply with the number only.",
            )
        ), bare
    return q, full


def addition(rng: Rng, h: bool) -> Ex:
    a, b = _pair(rng, h, "add", lambda: (_operand(rng), _operand(rng)))
    q = rng.choice(
        (
            f"What is {a} + {b}?",
            f"What is {a} plus {b}?",
            f"{a} + {b}",
            f"{a}+{b}",
            f"{a} + {b} =",
            f"Add {a} and {b}.",
            f"Add {b} to {a}.",
            f"Calculate {a} + {b}.",
            f"What's the sum of {a} and {b}?",
            f"How much is {a} plus {b}?",
            f"Compute {a} + {b}.",
            f"What is {a}+{b}?",
            f"Find the sum of {a} and {b}.",
            f"Tell me {a} + {b}.",
        )
    )
    q, ans = _only(rng, q, f"{a} + {b} = {a + b}.", str(a + b))
    return qa(rng, q, ans, add_steps(a, b))


def subtraction(rng: Rng, h: bool) -> Ex:
    a, b = _pair(rng, h, "sub", lambda: (_operand(rng), _operand(rng)))
    if a < b and rng.random() < 0.8:
        a, b = b, a
    q = rng.choice(
        (
            f"What is {a} - {b}?",
            f"What is {a} minus {b}?",
            f"{a} - {b}",
            f"{a}-{b}",
            f"{a} - {b} =",
            f"Subtract {b} from {a}.",
            f"Take {b} away from {a}.",
            f"Calculate {a} - {b}.",
            f"What's the difference {a} - {b}?",
            f"How much is {a} minus {b}?",
            f"Compute {a} - {b}.",
            f"What is {a}-{b}?",
        )
    )
    q, ans = _only(rng, q, f"{a} - {b} = {a - b}.", str(a - b))
    if a < b:
        t = f"{a} is smaller than {b}, so the result is negative.\n{b} - {a} = {b - a}\n{a} - {b} = {a - b}"
    else:
        t = f"I check it by adding: {a - b} + {b} = {a}.\n{a} - {b} = {a - b}"
    return qa(rng, q, ans, t)


def mul_steps(a: int, b: int) -> list[str]:
    """Written out: split the smaller operand by digits, multiply, add up."""
    big, small = max(a, b), min(a, b)
    if small < 10:
        if big < 13:
            return [f"{a} × {b} = {a * b}"]
        parts = [int(c) * 10 ** (len(str(big)) - 1 - i) for i, c in enumerate(str(big)) if c != "0"]
        out = [f"{p} × {small} = {p * small}" for p in parts]
        acc = parts[0] * small
        for p in parts[1:]:
            out.append(f"{acc} + {p * small} = {acc + p * small}")
            acc += p * small
        return out
    tens, ones = small // 10 * 10, small % 10
    out = mul_steps(big, tens // 10)[:] if big > 12 else []
    out.append(f"{big} × {tens} = {big * tens}")
    if ones:
        out += mul_steps(big, ones)[:] if big > 12 and ones > 1 else []
        out.append(f"{big} × {ones} = {big * ones}")
        out.append(f"{big * tens} + {big * ones} = {big * tens + big * ones}")
    return out


def _mul_q(rng: Rng, a: int, b: int) -> str:
    return rng.choice(
        (
            f"What is {a} × {b}?",
            f"What is {a} times {b}?",
            f"{a} * {b}",
            f"{a}*{b}",
            f"{a} x {b}",
            f"{a} × {b} =",
            f"Multiply {a} by {b}.",
            f"Calculate {a} * {b}.",
            f"What's the product of {a} and {b}?",
            f"How much is {a} times {b}?",
            f"Compute {a} × {b}.",
            f"What is {a} * {b}?",
        )
    )


def multiplication(rng: Rng, h: bool) -> Ex:
    """Two digits by two digits (or three by one): always worked out in the open, because held-out pairs cannot be remembered."""

    def draw() -> tuple[int, int]:
        if rng.random() < 0.75:
            return rng.randrange(13, 100), rng.randrange(11, 100)
        a, b = rng.randrange(101, 1000), rng.randrange(2, 10)
        return (a, b) if rng.random() < 0.7 else (b, a)

    a, b = _pair(rng, h, "mul", draw)
    steps = "\n".join(mul_steps(a, b))
    return qa(
        rng, _mul_q(rng, a, b), f"{steps}\n{a} × {b} = {a * b}.", steps, extra={"think_answer": f"{a} × {b} = {a * b}."}
    )


def tables(rng: Rng, h: bool) -> Ex:
    """The small multiplication table and one-digit products, taught whole (there is no held-out part)."""
    a, b = (
        (rng.randrange(0, 13), rng.randrange(0, 13))
        if rng.random() < 0.6
        else (rng.randrange(13, 100), rng.randrange(0, 10))
    )
    if rng.random() < 0.3 and 0 < b < 13:
        q = rng.choice(
            (
                f"What is {a * b} / {b}?",
                f"What is {a * b} divided by {b}?",
                f"{a * b} / {b}",
                f"Divide {a * b} by {b}.",
                f"{a * b} ÷ {b}",
            )
        )
        q, ans = _only(rng, q, f"{a * b} / {b} = {a}.", str(a))
        return qa(rng, q, ans, f"{b} × {a} = {a * b}, so {a * b} / {b} = {a}")
    if rng.random() < 0.5:
        a, b = b, a
    q, ans = _only(rng, _mul_q(rng, a, b), f"{a} × {b} = {a * b}.", str(a * b))
    return qa(rng, q, ans, "\n".join(mul_steps(a, b)))


def big_addition(rng: Rng, h: bool) -> Ex:
    a, b = _pair(rng, h, "add", lambda: (rng.randrange(1000, 100000), rng.randrange(100, 100000)))
    q = rng.choice(
        (f"What is {a} + {b}?", f"{a} + {b}", f"Add {a} and {b}.", f"Calculate {a} + {b}.", f"What is {a} plus {b}?")
    )
    s = add_steps(a, b)
    return qa(rng, q, s + ".", s, extra={"think_answer": f"{a} + {b} = {a + b}."})


def chain(rng: Rng, h: bool) -> Ex:
    while True:
        a, b, c = (rng.randrange(1, 100) for _ in range(3))
        if held(f"chain:{a}:{b}:{c}") == h:
            break
    if rng.random() < 0.5:
        q, s2, e = (
            rng.choice(
                (
                    f"What is {a} + {b} + {c}?",
                    f"{a} + {b} + {c}",
                    f"Add {a}, {b} and {c}.",
                    f"What is {a} plus {b} plus {c}?",
                )
            ),
            a + b,
            a + b + c,
        )
        t = f"{a} + {b} = {s2}, {s2} + {c} = {e}"
    else:
        c = rng.randrange(1, a + b)
        q, s2, e = (
            rng.choice((f"What is {a} + {b} - {c}?", f"{a} + {b} - {c}", f"What is {a} plus {b} minus {c}?")),
            a + b,
            a + b - c,
        )
        t = f"{a} + {b} = {s2}, {s2} - {c} = {e}"
    return qa(rng, q, t + ".", t.replace(", ", "\n"))


def word_problem(rng: Rng, h: bool) -> Ex:
    n, thing = name(rng, h), rng.choice((rng.choice(W.FOODS), rng.choice(W.OBJECTS)))
    s = (
        thing + ("es" if thing[-2:] in ("sh", "ch", "to") or thing[-1] in "sx" else "s")
        if not (thing.endswith("y") and thing[-2] not in "aeou")
        else thing[:-1] + "ies"
    )
    k = rng.randrange(4)
    if k == 0:
        a, b = _pair(rng, h, "wp", lambda: (rng.randrange(2, 100), rng.randrange(2, 100)))
        q = rng.choice(
            (
                f"{n} has {a} {s} and buys {b} more. How many {s} does {n} have now?",
                f"{n} has {a} {s}. {n} gets {b} more. How many {s} are there now?",
                f"There are {a} {s} in one box and {b} {s} in another. {n} takes all of them. How many {s} does {n} take?",
            )
        )
        e, r = f"{a} + {b} = {a + b}", a + b
    elif k == 1:
        a, b = _pair(rng, h, "wp", lambda: (rng.randrange(2, 100), rng.randrange(2, 100)))
        a, b = max(a, b), min(a, b)
        q = rng.choice(
            (
                f"{n} has {a} {s} and gives away {b}. How many {s} are left?",
                f"{n} had {a} {s} but lost {b}. How many {s} does {n} have now?",
                f"{n} buys {a} {s} and uses {b} of them. How many {s} remain?",
            )
        )
        e, r = f"{a} - {b} = {a - b}", a - b
    elif k == 2:
        a, b = _pair(rng, h, "wp2", lambda: (rng.randrange(2, 13), rng.randrange(2, 13)))
        q = rng.choice(
            (
                f"{n} has {a} boxes with {b} {s} each. How many {s} does {n} have?",
                f"A {thing} costs {b} dollars. How much do {a} {s} cost?",
            )
        )
        e, r = f"{a} × {b} = {a * b}", a * b
        if "cost" in q:
            return qa(rng, q, f"{e}. The {s} cost {r} dollars.", f"I multiply the number by the price.\n{e}")
    else:
        a, b = _pair(rng, h, "wp", lambda: (rng.randrange(2, 60), rng.randrange(2, 60)))
        c = rng.randrange(1, a + b)
        q = f"{n} has {a} {s}, buys {b} more and then gives away {c}. How many {s} does {n} have now?"
        e, r = f"{a} + {b} = {a + b}, {a + b} - {c} = {a + b - c}", a + b - c
    return qa(rng, q, f"{e}. The answer is {r} {s}.", "I write it as a calculation.\n" + e.replace(", ", "\n"))


def compare(rng: Rng, h: bool) -> Ex:
    k = rng.randrange(4)
    if k == 0:
        while True:
            a, b = _pair(rng, h, "cmp", lambda: (_operand(rng), _operand(rng)))
            if a != b:
                break
        big = rng.random() < 0.5
        q = rng.choice(
            (
                f"Which is {'bigger' if big else 'smaller'}, {a} or {b}?",
                f"Which number is {'larger' if big else 'smaller'}: {a} or {b}?",
                f"Is {a} or {b} {'greater' if big else 'smaller'}?",
            )
        )
        r = max(a, b) if big else min(a, b)
        w = "bigger" if big else "smaller"
        return qa(rng, q, f"{r} is {w}.", f"I compare {a} and {b}. The {w} one is {r}.")
    if k == 1:
        while held(f"even:{(n := rng.randrange(0, 10000))}") != h:
            pass
        par = "odd" if n % 2 else "even"
        return qa(
            rng,
            rng.choice((f"Is {n} even or odd?", f"Is the number {n} odd or even?", f"Even or odd: {n}")),
            f"{n} is {par}.",
            f"The last digit of {n} is {n % 10}, which is {par}.",
        )
    xs = _numbers(rng, h, rng.randint(3, 8))
    big = k == 2
    w = rng.choice(("largest", "biggest", "greatest", "highest") if big else ("smallest", "lowest", "least"))
    q = rng.choice(
        (
            f"What is the {w} of these numbers: {_join(xs)}?",
            f"Find the {w} number: {_join(xs)}",
            f"Which number is the {w}: {_join(xs)}?",
        )
    )
    r = max(xs) if big else min(xs)
    w2 = "largest" if big else "smallest"
    return qa(
        rng, q, f"The {w2} number is {r}.", "I go through the list and keep the " + w2 + " so far.\n" + _scan(xs, big)
    )


def _scan(xs: list[int], big: bool) -> str:
    out, best = [], xs[0]
    for x in xs:
        best = max(best, x) if big else min(best, x)
        out.append(f"{x}: {best}")
    return "\n".join(out)


def number_words(rng: Rng, h: bool) -> Ex:
    while held(f"nw:{(n := rng.choice((rng.randrange(100), rng.randrange(1000), rng.randrange(10000))))}") != h:
        pass
    t = W.in_words(n)
    if rng.random() < 0.5:
        return qa(
            rng,
            rng.choice(
                (
                    f"Write {n} in words.",
                    f"Write the number {n} in words.",
                    f"How do you say {n} in words?",
                    f"Spell out the number {n}.",
                )
            ),
            t,
            f"I read {n} digit by digit from the left.",
        )
    return qa(
        rng,
        rng.choice(
            (
                f"Write '{t}' in digits.",
                f"Write the number {t} as digits.",
                f"What number is {t}?",
                f"Write {t} with digits.",
            )
        ),
        str(n),
        f"The words are {t}.",
    )


# ---------------------------------------------------------------- letters and lists


def _join(xs: list[Any]) -> str:
    return ", ".join(map(str, xs))


def _numbers(rng: Rng, h: bool, n: int) -> list[int]:
    hi = rng.choice((20, 100, 100, 1000, 1000))
    while True:
        xs = [rng.randrange(hi) for _ in range(n)] if hi < n else rng.sample(range(hi), n)
        if rng.random() < 0.1:
            xs[-1] = xs[0]
        if held("list:" + _join(sorted(xs))) == h:
            return xs


def _phrase(rng: Rng, h: bool, lo: int = 2, hi: int = 7, p_real: float = 0.75) -> str:
    while True:
        p = " ".join(word(rng, None, p_real) for _ in range(rng.randint(lo, hi)))
        if held("phrase:" + p) == h:
            return p


EXOTIC = """é ü ñ ß ø å ç ö ä î → ← ✓ ★ ☀ ☂ ♥ ♪ € £ ° … – 😀 🚀 🌍 🐱 🐶 🎉 🍎 🔥 👍 🐟 日 本 中 文 水 火 你 好 こ ん に ち は Я Ж д л м П р и в е т α β γ δ π Ω
naïve café Zürich São señor crème Ångström привет 你好 こんにちは""".split()


def repeat(rng: Rng, h: bool) -> Ex:
    r = rng.random()
    if r < 0.5:
        p = _phrase(rng, h, 1, 12)
    elif r < 0.75:
        p = _phrase(rng, h, 2, 10).capitalize() + rng.choice((".", "!", "?"))
        if rng.random() < 0.6:  # marks and numbers inside
            p = " ".join(
                x + rng.choice(("", "", "", ",", "!", ";", ":", " -", "."))
                if rng.random() < 0.8
                else str(rng.randrange(1000))
                for x in p.split()
            )
    elif r < 0.9:
        while (
            held(
                "code:"
                + (
                    p := "".join(
                        rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789abcdefghijkmnopqrstuvwxyz-_")
                        for _ in range(rng.randint(4, 16))
                    )
                )
            )
            != h
        ):
            pass
    else:
        while (
            held(
                "exotic:"
                + (
                    p := " ".join(
                        rng.choice(EXOTIC) if rng.random() < 0.7 else word(rng) for _ in range(rng.randint(1, 7))
                    )
                )
            )
            != h
        ):
            pass
    quote = rng.choice(('"', "'", ""))
    s = f"{quote}{p}{quote}"
    if rng.random() < 0.25:
        n = rng.randint(2, 5)
        unit = (
            {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[n] if rng.random() < 0.5 else f"{n} times"
        )
        q = rng.choice(
            (f"Repeat {s} {unit}.", f"Say {s} {unit}.", f"Write {s} {unit}, one per line.", f"Repeat {unit}: {s}")
        )
        return qa(rng, q, "\n".join([p] * n), f"I write it {unit}.")
    q = rng.choice(
        (
            f"Repeat after me: {s}",
            f"Repeat: {s}",
            f"Say {s}",
            f"Repeat this exactly: {s}",
            f"Please repeat the following text: {s}",
            f"Echo: {s}",
            f"Write exactly this: {s}",
            f"Copy this text:\n{s}",
            f"Repeat the text: {s}",
        )
    )
    return Ex([user(q), bot(p)], thought="I copy the text exactly.")


def _cword(rng: Rng, h: bool) -> str:
    return word(rng, h, 0.65)


def _quoted(rng: Rng, w: str) -> str:
    return rng.choice((f'"{w}"', f"'{w}'", f'"{w}"', w, w))


def reverse(rng: Rng, h: bool) -> Ex:
    if rng.random() < 0.65:
        w = _cword(rng, h)
        s = _quoted(rng, w)
        q = rng.choice(
            (
                f"Reverse {s}.",
                f"Reverse the word {s}.",
                f"Write {s} backwards.",
                f"Spell {s} backwards.",
                f"What is {s} backwards?",
                f"Reverse the letters of {s}.",
                f"Reverse: {w}",
                f"Can you reverse the string {s}?",
                f"What is {s} reversed?",
                f"Write the word {s} in reverse.",
            )
        )
        return qa(rng, q, w[::-1], f"The letters of the word are {'-'.join(w)}.\nFrom the end: {'-'.join(w[::-1])}")
    if rng.random() < 0.5:
        xs: list[Any] = _numbers(rng, h, rng.randint(3, 8))
    else:
        xs = _phrase(rng, h, 3, 8).split()
    q = rng.choice(
        (
            f"Reverse this list: {_join(xs)}",
            f"Reverse the order of: {_join(xs)}",
            f"Write this list in reverse order: {_join(xs)}",
            f"Reverse the list {_join(xs)}.",
        )
    )
    return qa(rng, q, _join(xs[::-1]), "I start with the last item and go back to the first.")


def sort(rng: Rng, h: bool) -> Ex:
    if rng.random() < 0.55:
        xs: list[Any] = _numbers(rng, h, rng.randint(3, 9))
        down = rng.random() < 0.3
        r = sorted(xs, reverse=down)
        way = (
            rng.choice(("from largest to smallest", "in descending order", "from high to low", "descending"))
            if down
            else rng.choice(("", "", "from smallest to largest", "in ascending order", "from low to high", "ascending"))
        )
        q = rng.choice(
            (
                f"Sort these numbers {way}: {_join(xs)}",
                f"Sort {way}: {_join(xs)}",
                f"Put these numbers in order {way}: {_join(xs)}",
                f"Order these numbers {way}: {_join(xs)}",
                f"Sort the numbers {_join(xs)} {way}.",
            )
        )
        q = q.replace("  ", " ").replace(" :", ":").replace(" .", ".")
        return qa(
            rng, q, _join(r), f"I take the {'largest' if down else 'smallest'} number that is left, again and again."
        )
    while True:
        xs = list(dict.fromkeys(word(rng, None, 0.9) for _ in range(rng.randint(3, 7))))
        if held("list:" + _join(sorted(xs))) == h and len(xs) > 2:
            break
    q = rng.choice(
        (
            f"Sort these words alphabetically: {_join(xs)}",
            f"Sort alphabetically: {_join(xs)}",
            f"Put these words in alphabetical order: {_join(xs)}",
            f"Sort these words: {_join(xs)}",
            f"Order these words from A to Z: {_join(xs)}",
            f"Alphabetize: {_join(xs)}",
        )
    )
    return qa(rng, q, _join(sorted(xs)), "I compare the first letters, then the next ones.")


def case(rng: Rng, h: bool) -> Ex:
    k = rng.randrange(4)
    p = _cword(rng, h) if rng.random() < 0.4 else _phrase(rng, h, 2, 6)
    if k < 2:
        s = _quoted(rng, p if rng.random() < 0.8 else p.title())
        q = rng.choice(
            (
                f"Write {s} in uppercase.",
                f"Convert {s} to uppercase.",
                f"Uppercase: {p}",
                f"Make {s} all caps.",
                f"Write {s} in capital letters.",
                f"Turn {s} into uppercase.",
                f"Convert to uppercase: {p}",
            )
        )
        return qa(rng, q, p.upper(), "I write every letter as a capital.")
    if k == 2:
        s = _quoted(rng, p.upper() if rng.random() < 0.7 else p.title())
        q = rng.choice(
            (
                f"Write {s} in lowercase.",
                f"Convert {s} to lowercase.",
                f"Make {s} lowercase.",
                f"Turn {s} into lowercase.",
                f"Write {s} in small letters.",
            )
        )
        return qa(rng, q, p.lower(), "I write every letter small.")
    s = _quoted(rng, p)
    q = rng.choice(
        (
            f"Capitalize each word: {p}",
            f"Write {s} in title case.",
            f"Convert {s} to title case.",
            f"Capitalize the first letter of each word in {s}.",
        )
    )
    return qa(rng, q, p.title(), "I make the first letter of each word a capital.")


def spell(rng: Rng, h: bool) -> Ex:
    w = _cword(rng, h)
    s = _quoted(rng, w)
    k = rng.randrange(5)
    if k == 0:
        return qa(
            rng,
            rng.choice((f"Spell {s} with spaces between the letters.", f"Write {s} with a space between each letter.")),
            " ".join(w),
            "I write the letters one by one.",
        )
    if k == 1:
        return qa(
            rng,
            rng.choice(
                (
                    f"List the letters of {s}, separated by commas.",
                    f"What are the letters in the word {s}?",
                    f"Which letters are in {s}?",
                )
            ),
            ", ".join(w),
            "I write the letters one by one.",
        )
    if k == 2:
        i = rng.randrange(min(len(w), 8))
        q = rng.choice((f"What is the {W.ORDINALS[i]} letter of {s}?", f"Which letter is number {i + 1} in {s}?"))
        return qa(
            rng,
            q,
            f"{'-'.join(w[: i + 1])}: the {W.ORDINALS[i]} letter is {w[i]}.",
            f"The letters are {'-'.join(w)}.",
            check="exact",
        )
    q = rng.choice(
        (
            f"Spell {s}.",
            f"Spell the word {s}.",
            f"How do you spell {s}?",
            f"Spell {s} letter by letter.",
            f"Can you spell {s}?",
            f"Spell: {w}",
            f"Spell out {s}.",
            f"Spell the word {s} with hyphens.",
        )
    )
    return qa(rng, q, "-".join(w), "I write the letters one by one.")


def counting(rng: Rng, h: bool) -> Ex:
    k = rng.random()
    if k < 0.55:
        while True:
            a = rng.choice((1, rng.randrange(0, 30), rng.randrange(0, 200), rng.randrange(0, 950)))
            b = a + rng.randint(2, 25)
            if held(f"count:{a}:{b}") == h:
                break
        if rng.random() < 0.3:
            q = rng.choice(
                (f"Count down from {b} to {a}.", f"Count backwards from {b} to {a}.", f"Count from {b} down to {a}.")
            )
            return qa(rng, q, _join(list(range(b, a - 1, -1))), f"I start at {b} and go down by one until {a}.")
        q = rng.choice(
            (
                f"Count from {a} to {b}.",
                f"Count up from {a} to {b}.",
                f"List the numbers from {a} to {b}.",
                f"Write the numbers from {a} to {b}.",
                f"Can you count from {a} to {b}?",
                f"Count to {b} starting at {a}.",
            )
        )
        if a == 1 and rng.random() < 0.5:
            q = rng.choice((f"Count to {b}.", f"Count up to {b}."))
        return qa(rng, q, _join(list(range(a, b + 1))), f"I start at {a} and go up by one until {b}.")
    if k < 0.8:
        while True:
            s = rng.choice((2, 2, 3, 4, 5, 5, 10, 10, 20, 25, 50, 100))
            a = rng.choice((0, s, s, s * rng.randrange(1, 10), rng.randrange(0, 50)))
            b = a + s * rng.randint(2, 12)
            if held(f"step:{s}:{a}:{b}") == h:
                break
        names = {
            2: "twos",
            3: "threes",
            4: "fours",
            5: "fives",
            10: "tens",
            20: "twenties",
            25: "twenty-fives",
            50: "fifties",
            100: "hundreds",
        }
        q = rng.choice(
            (
                f"Count by {names[s]} from {a} to {b}.",
                f"Count from {a} to {b} by {s}.",
                f"Count from {a} to {b} in steps of {s}.",
            )
        )
        return qa(rng, q, _join(list(range(a, b + 1, s))), f"I start at {a} and add {s} until {b}.")
    xs = _phrase(rng, h, 2, 12, 0.95).split()
    n = len(xs)
    if rng.random() < 0.5:
        q = rng.choice(
            (
                f"How many items are in this list: {_join(xs)}?",
                f"Count the items: {_join(xs)}",
                f"How many words are in this list: {_join(xs)}?",
            )
        )
        kind = "items" if "items" in q else "words"
    else:
        q, kind = (
            rng.choice(
                (f'How many words are in "{" ".join(xs)}"?', f"Count the words in this sentence: {' '.join(xs)}")
            ),
            "words",
        )
    t = "\n".join(f"{i + 1} {x}" for i, x in enumerate(xs))
    return qa(rng, q, f"{t}\nThere are {n} {kind}.", t, extra={"think_answer": f"There are {n} {kind}."})


def letter_count(rng: Rng, h: bool) -> Ex:
    w = _cword(rng, h)
    s = _quoted(rng, w)
    if rng.random() < 0.5:
        n = len(w)
        t = ", ".join(f"{c} {i + 1}" for i, c in enumerate(w))
        q = rng.choice(
            (
                f"How many letters are in {s}?",
                f"How many letters does {s} have?",
                f"Count the letters in {s}.",
                f"How long is the word {s}?",
            )
        )
        return qa(rng, q, f"{t}. The word has {n} letters.", t, extra={"think_answer": f"The word has {n} letters."})
    c = rng.choice(w) if rng.random() < 0.8 else rng.choice("aeiourst")
    k, out = 0, []
    for x in w:
        k += x == c
        out.append(f"{x} {k}")
    t = ", ".join(out)
    times = "once" if k == 1 else f"{k} times"
    a = f"The letter {c} appears {times}." if k else f"The letter {c} does not appear."
    q = rng.choice(
        (
            f"How many times does the letter {c} appear in {s}?",
            f"How many {c}'s are in {s}?",
            f"Count the letter {c} in {s}.",
            f'How many times does "{c}" occur in {s}?',
            f"How many letters {c} are in the word {s}?",
        )
    )
    return qa(rng, q, f"{t}. {a}", t, extra={"think_answer": a})


def pick(rng: Rng, h: bool) -> Ex:
    xs = list(dict.fromkeys(_phrase(rng, h, 3, 8).split()))
    k = rng.randrange(4)
    i = rng.randrange(len(xs))
    lst = _join(xs)
    if k == 0:
        q, i = rng.choice((f"What is the first item in this list: {lst}?", f"What is the first word: {lst}?")), 0
    elif k == 1:
        q, i = (
            rng.choice((f"What is the last item in this list: {lst}?", f"Which word comes last: {lst}?")),
            len(xs) - 1,
        )
    elif k == 2:
        q = rng.choice(
            (
                f"What is the {W.ORDINALS[i]} item in this list: {lst}?",
                f"Which word is {W.ORDINALS[i]} in this list: {lst}?",
                f"Give me item {i + 1} of this list: {lst}",
            )
        )
    else:
        ys = [x for j, x in enumerate(xs) if x != xs[i]]
        q = rng.choice(
            (
                f"Remove {xs[i]} from this list: {lst}",
                f"Delete the word {xs[i]} from this list: {lst}",
                f"Write this list without {xs[i]}: {lst}",
            )
        )
        return qa(rng, q, _join(ys), f"I leave out {xs[i]}.")
    return qa(
        rng, q, xs[i], "I go through the list from the start:\n" + "\n".join(f"{j + 1} {x}" for j, x in enumerate(xs))
    )


# ---------------------------------------------------------------- memory


def _cap(s: str) -> str:
    return s[:1].upper() + s[1:]


def fact_about_me(rng: Rng, h: bool) -> tuple[str, str, str]:
    """(statement, question, answer) with held-out content when h."""
    k = rng.randrange(11)
    if h and k == 8:  # too few ages to hold some out
        k = 0
    if k <= 2:
        n = name(rng, h)
        return (
            rng.choice(
                (
                    f"My name is {n}.",
                    f"I'm {n}.",
                    f"Hi, I am {n}.",
                    f"Hello, my name is {n}!",
                    f"You can call me {n}.",
                    f"Call me {n}.",
                    f"Hi! I'm {n}.",
                    f"Please remember that my name is {n}.",
                    f"The name's {n}.",
                    f"I am called {n}.",
                )
            ),
            rng.choice(
                (
                    "What is my name?",
                    "What's my name?",
                    "Do you remember my name?",
                    "Who am I?",
                    "Can you tell me my name?",
                    "What was my name again?",
                )
            ),
            f"Your name is {n}.",
        )
    if k == 3:
        v = number(rng, h, rng.randint(1, 6)) if not h else number(rng, h, rng.randint(4, 6))
        return (
            rng.choice(
                (
                    f"My favorite number is {v}.",
                    f"My lucky number is {v}.",
                    f"Remember the number {v}.",
                    f"The number to remember is {v}.",
                    f"Please remember this number: {v}",
                )
            ),
            rng.choice(
                (
                    "What number did I tell you?",
                    "Which number did I give you?",
                    "What was the number?",
                    "What number did I mention?",
                )
            ),
            f"The number is {v}.",
        )
    if k == 4:
        w = word(rng, h)
        return (
            rng.choice(
                (
                    f"The secret word is {w}.",
                    f"Remember the word {w}.",
                    f"The password is {w}.",
                    f'Please remember this word: "{w}"',
                    f"The magic word is {w}.",
                )
            ),
            rng.choice(
                (
                    "What is the word I told you?",
                    "What word did I give you?",
                    "What was the word?",
                    "Which word did I ask you to remember?",
                )
            ),
            f"The word is {w}.",
        )
    if k == 5:
        c = rng.choice(W.COLORS) if not h else word(rng, h, 0.2)
        return (
            rng.choice((f"My favorite color is {c}.", f"I like the color {c} most.")),
            rng.choice(("What is my favorite color?", "Which color do I like most?")),
            f"Your favorite color is {c}.",
        )
    if k == 6:
        a, n = rng.choice(W.ANIMALS), name(rng, h)
        return (
            rng.choice(
                (
                    f"I have a {a} named {n}.",
                    f"My {a} is called {n}.",
                    f"My {a}'s name is {n}.",
                    f"I got a new {a} named {n}.",
                    f"I am happy because I have a new {a} called {n}.",
                    f"This is my {a} {n}.",
                )
            ),
            rng.choice((f"What is the name of my {a}?", f"What is my {a} called?", f"What's my {a}'s name?")),
            f"Your {a} is called {n}.",
        )
    if k == 7:
        c = city(rng, h)
        return (
            rng.choice((f"I live in {c}.", f"I am from {c}.", f"My home is in {c}.")),
            rng.choice(("Where do I live?", "Where am I from?", "Which city do I live in?")),
            f"You live in {c}.",
        )
    if k == 8:
        v = rng.randrange(5, 100)
        return (
            rng.choice((f"I am {v} years old.", f"I'm {v} years old.", f"My age is {v}.")),
            rng.choice(("How old am I?", "What is my age?")),
            f"You are {v} years old.",
        )
    if k == 9:
        rel, n = (
            rng.choice("brother sister mother father friend teacher boss neighbor cousin daughter son".split()),
            name(rng, h),
        )
        return (
            rng.choice((f"My {rel} is called {n}.", f"My {rel}'s name is {n}.", f"I have a {rel} named {n}.")),
            rng.choice((f"What is my {rel}'s name?", f"What is my {rel} called?", f"What's the name of my {rel}?")),
            f"Your {rel} is called {n}.",
        )
    v2 = number(rng, h, 4) if h else number(rng, h, rng.randint(3, 6))
    what = rng.choice("room code order ticket locker flight badge parking invoice account".split())
    return (
        rng.choice((f"My {what} number is {v2}.", f"The {what} number is {v2}.")),
        rng.choice((f"What is my {what} number?", f"What is the {what} number?", f"Tell me the {what} number.")),
        f"The {what} number is {v2}.",
    )


def _ack(rng: Rng, statement: str) -> str:
    for pat in ("name is ", "I'm ", "I am ", "call me ", "Call me "):
        if pat in statement and not any(x in statement for x in ("years old", "from ", "'s name")):
            n = statement.split(pat)[1].rstrip(".!")
            if n[:1].isupper():
                return f"Nice to meet you, {n}!"
    return "Thank you, I will remember that."


def recall(rng: Rng, h: bool) -> Ex:
    """A name, number or word told earlier in the conversation, other talk in between."""
    told: dict[str, tuple[str, str, str]] = {}
    for _ in range(rng.randint(1, 4)):
        s, q, a = fact_about_me(rng, h)
        told.setdefault(a.split(" is ")[0].split(" in ")[0].split(" are ")[0], (s, q, a))
    facts = list(told.values())
    turns: list[Message] = []
    if rng.random() < 0.3:
        turns += [
            user(" ".join(f[0] for f in facts)),
            bot(_ack(rng, facts[0][0]) if len(facts) == 1 else "Thank you, I will remember that."),
        ]
    else:
        for s, _, _ in facts:
            turns += [user(s), bot(_ack(rng, s))]
            if rng.random() < 0.4:
                turns += _small(rng)
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        turns += _small(rng)
    rng.shuffle(facts)
    n = 1 if h else rng.randint(1, min(2, len(facts)))
    for _, q, a in facts[:n]:
        turns += [user(ask(rng, q)), bot(a)]
    return Ex(
        turns,
        solo=True,
        thought=f"I look back in the conversation for what the user said: {facts[0][0]}" if n == 1 else None,
    )


def not_told(rng: Rng, h: bool) -> Ex:
    """Asked for something that the user never said."""
    _, q, a = fact_about_me(rng, False)
    kinds = {
        "Your name is": "your name",
        "Your favorite color": "your favorite color",
        "You live in": "where you live",
        "You are": "your age",
        "The word is": "the word",
        "The number is": "the number",
    }
    for k, v in kinds.items():
        if a.startswith(k):
            return Ex(
                [user(ask(rng, q)), bot(f"You have not told me {v} yet.")],
                solo=True,
                thought="I look back in the conversation, but the user has not said it.",
            )
    what = a.split(" is ")[0].replace("Your", "your").replace("The", "the")
    return Ex(
        [user(ask(rng, q)), bot(f"You have not told me about {what} yet.")],
        solo=True,
        thought="I look back in the conversation, but the user has not said it.",
    )


def _small(rng: Rng) -> list[Message]:
    f = rng.choice((addition, greeting, fact, spell, smalltalk, sort, about_manta, case, repeat, compare))
    return f(rng, False).turns


def _filler(rng: Rng) -> str:
    a, b, c = rng.choice(W.ADJECTIVES), rng.choice(W.ANIMALS + W.OBJECTS), rng.choice(W.NATURE)
    v, n, n2 = rng.choice(W.VERBS), rng.choice(W.NOUNS), rng.choice(W.NOUNS)
    return rng.choice(
        (
            f"The {a} {b} is near the {c}.",
            f"A {b} and a {n} were seen by the {c}.",
            f"The {n} likes to {v} in the {c}.",
            f"Every {n} should {v} before the {n2}.",
            f"It was a {a} day at the {c}.",
            f"Nobody knows why the {b} is so {a}.",
            f"The {n} of the {n2} was {a}.",
            f"In the {c} there is a {a} {n}.",
            f"They {v} and talk about the {n}.",
            f"The {n} and the {n2} have little in common.",
            f"Some say that the {c} is {a}.",
            f"The {b} costs {rng.randrange(2, 100)} dollars.",
            "The grass is green and the sky is blue.",
            "The quick brown fox jumps over the lazy dog.",
            "This sentence is not important.",
            f"Chapter {rng.randrange(1, 40)} is about the {n}.",
        )
    )


def _record(rng: Rng, h: bool) -> tuple[str, str, str, str]:
    """(kind-key, statement, question, answer) for a long text."""
    k = rng.randrange(6)
    if k == 0:
        n, v = name(rng, h), number(rng, h, rng.randint(4, 6))
        return (
            f"code {n}",
            f"The access code of {n} is {v}.",
            rng.choice(
                (f"What is the access code of {n}?", f"What is {n}'s access code?", f"Tell me the access code of {n}.")
            ),
            f"The access code of {n} is {v}.",
        )
    if k == 1:
        n, w = name(rng, h), word(rng, h)
        return (
            f"word {n}",
            f"The password of {n} is {w}.",
            rng.choice((f"What is the password of {n}?", f"What is {n}'s password?", f"Which password does {n} have?")),
            f"The password of {n} is {w}.",
        )
    if k == 2:
        n, c = name(rng, h), city(rng, h)
        return (
            f"city {n}",
            f"{n} lives in {c}.",
            rng.choice((f"Where does {n} live?", f"In which city does {n} live?")),
            f"{n} lives in {c}.",
        )
    if k == 3:
        n, j = (
            name(rng, h),
            rng.choice(
                "teacher baker doctor pilot nurse farmer painter writer sailor driver cook judge singer".split()
            ),
        )
        return (
            f"job {n}",
            f"{n} works as a {j}.",
            rng.choice((f"What does {n} do for a living?", f"What is {n}'s job?", f"What work does {n} do?")),
            f"{n} works as a {j}.",
        )
    if k == 4:
        o, v = word(rng, h), rng.randrange(2, 1000)
        return (
            f"price {o}",
            f"The price of the {o} is {v} dollars.",
            rng.choice((f"What is the price of the {o}?", f"How much is the {o}?", f"What does the {o} cost?")),
            f"The price of the {o} is {v} dollars.",
        )
    v = number(rng, h, rng.randint(4, 7))
    s = rng.choice(("secret number", "magic number", "special number", "secret code", "vault code", "launch code"))
    return (
        s,
        f"The {s} is {v}.",
        rng.choice((f"What is the {s}?", f"Tell me the {s}.", f"Which {s} was given in the text?")),
        f"The {s} is {v}.",
    )


def recall_long(rng: Rng, h: bool, target: int | None = None) -> Ex:
    """One line far up in a long text, many lines like it around. `target` is roughly the number of tokens."""
    target = target or int(10 ** rng.uniform(2.0, 3.52))
    recs: dict[str, tuple[str, str, str, str]] = {}
    lines: list[str] = []
    size, dens, rep = 0, rng.choice((0.05, 0.2, 0.5, 0.9)), _filler(rng) if rng.random() < 0.2 else None
    while size < target - 60:
        if rng.random() < dens:
            r = _record(rng, h)
            if r[0] in recs:
                continue
            recs[r[0]] = r
            lines.append(r[1])
            size += 5 + len(r[1]) // 3
        else:
            lines.append(rep or _filler(rng))
            size += 4 + len(lines[-1]) // 4
    if not recs:
        r = _record(rng, h)
        recs[r[0]] = r
        lines.insert(rng.randrange(len(lines) + 1), r[1])
    picks = list(recs.values())
    _, s, q, a = rng.choice(picks[: max(1, len(picks) // 2)]) if rng.random() < 0.6 else rng.choice(picks)
    text = rng.choice((" ", "\n")).join(lines)
    style = rng.randrange(4)
    if style == 0:
        turns = [
            user(
                f"{rng.choice(('Read this text.', 'Here is a text:', 'Please read the following notes.', 'Text:'))}\n\n{text}\n\n{q}"
            ),
            bot(a),
        ]
    elif style == 1:
        turns = [user(text), bot("Thank you, I have read it."), user(q), bot(a)]
    elif style == 2:
        turns = [user(f"{text}\n{rng.choice(('Question: ', '', 'Answer this: '))}{q}"), bot(a)]
    else:
        return Ex(
            [user(q), bot(a)],
            system=rng.choice(("You know these notes:\n", "Notes:\n", "Use this text to answer.\n\n")) + text,
            solo=True,
            thought=f"The text says: {s}",
        )
    if not h and style and rng.random() < 0.6:
        for _, _, q2, a2 in rng.sample(picks, min(len(picks), rng.randint(1, 6))):
            turns += [user(q2), bot(a2)]
    return Ex(turns, solo=True, thought=f"The text says: {s}" if turns[-1]["content"] == a else None)


# ---------------------------------------------------------------- facts


def _fact_table() -> list[tuple[str, list[str], str]]:
    out: list[tuple[str, list[str], str]] = []
    for c, k in W.CAPITALS.items():
        out.append(
            (
                f"cap {c}",
                [
                    f"What is the capital of {c}?",
                    f"What's the capital of {c}?",
                    f"Tell me the capital of {c}.",
                    f"Which city is the capital of {c}?",
                    f"Name the capital of {c}.",
                    f"Capital of {c}?",
                    f"Do you know the capital of {c}?",
                ],
                f"The capital of {c} is {k}.",
            )
        )
        out.append(
            (
                f"capof {k}",
                [
                    f"{k} is the capital of which country?",
                    f"Which country has the capital {k}?",
                    f"Of which country is {k} the capital?",
                ],
                f"{k} is the capital of {c}.",
            )
        )
    for e, s in W.SYMBOLS.items():
        out.append(
            (
                f"sym {e}",
                [
                    f"What is the chemical symbol for {e}?",
                    f"What is the symbol of {e}?",
                    f"Which chemical symbol does {e} have?",
                    f"Chemical symbol of {e}?",
                ],
                f"The chemical symbol for {e} is {s}.",
            )
        )
        out.append(
            (
                f"symof {s}",
                [
                    f"Which element has the symbol {s}?",
                    f"What element is {s}?",
                    f"The chemical symbol {s} stands for which element?",
                ],
                f"{s} is the symbol for {e}.",
            )
        )
    for a, b in list(W.OPPOSITES.items()):
        for x, y in ((a, b), (b, a)):
            out.append(
                (
                    f"opp {x}",
                    [
                        f"What is the opposite of {x}?",
                        f"What's the opposite of {x}?",
                        f"Tell me the opposite of {x}.",
                        f"Give me the opposite of the word {x}.",
                    ],
                    f"The opposite of {x} is {y}.",
                )
            )
    for a, s in W.SOUNDS.items():
        out.append(
            (
                f"snd {a}",
                [f"What sound does a {a} make?", f"What does a {a} say?", f"Which sound does a {a} make?"],
                f"A {a} says {s}.",
            )
        )
    for a, n in W.LEGS.items():
        out.append(
            (
                f"leg {a}",
                [f"How many legs does a {a} have?", f"How many legs has a {a}?", f"Tell me how many legs a {a} has."],
                f"A {a} has {W.in_words(n) if n else 'no'} legs.",
            )
        )
    for a, b in W.BABIES.items():
        out.append(
            (
                f"baby {a}",
                [f"What is a baby {a} called?", f"What do you call a baby {a}?", f"What is the name for a young {a}?"],
                f"A baby {a} is called a {b}.",
            )
        )
    for lang, tab in (("Spanish", W.SPANISH), ("French", W.FRENCH)):
        for e, s in tab.items():
            out.append(
                (
                    f"{lang} {e}",
                    [
                        f"How do you say {e} in {lang}?",
                        f"What is the {lang} word for {e}?",
                        f"Translate {e} to {lang}.",
                        f"What is {e} in {lang}?",
                    ],
                    f"The {lang} word for {e} is {s}.",
                )
            )
    for i, p in enumerate(W.PLANETS):
        out.append(
            (
                f"planet {i}",
                [
                    f"What is the {W.ORDINALS[i]} planet from the sun?",
                    f"Which planet is {W.ORDINALS[i]} from the sun?",
                    f"Name the {W.ORDINALS[i]} planet.",
                ],
                f"The {W.ORDINALS[i]} planet from the sun is {p}.",
            )
        )
    for tab, what in ((W.DAYS, "day"), (W.MONTHS, "month")):
        for i, d in enumerate(tab):
            nx, pv = tab[(i + 1) % len(tab)], tab[i - 1]
            out.append(
                (
                    f"after {d}",
                    [f"What {what} comes after {d}?", f"Which {what} follows {d}?", f"What is the {what} after {d}?"],
                    f"{nx} comes after {d}.",
                )
            )
            out.append(
                (
                    f"before {d}",
                    [
                        f"What {what} comes before {d}?",
                        f"Which {what} is before {d}?",
                        f"What is the {what} before {d}?",
                    ],
                    f"{pv} comes before {d}.",
                )
            )
    for m, n in W.MONTH_DAYS.items():
        out.append((f"days {m}", [f"How many days does {m} have?", f"How many days are in {m}?"], f"{m} has {n} days."))
    for c, xs in W.CONTINENTS.items():
        for x in xs:
            out.append(
                (
                    f"cont {x}",
                    [
                        f"On which continent is {x}?",
                        f"Which continent is {x} in?",
                        f"What continent does {x} belong to?",
                    ],
                    f"{x} is in {c}.",
                )
            )
    misc = [
        ("How many days are in a week?|How many days does a week have?", "A week has seven days."),
        ("How many months are in a year?|How many months does a year have?", "A year has twelve months."),
        ("How many hours are in a day?|How many hours does a day have?", "A day has 24 hours."),
        ("How many minutes are in an hour?|How many minutes does an hour have?", "An hour has 60 minutes."),
        ("How many seconds are in a minute?|How many seconds does a minute have?", "A minute has 60 seconds."),
        (
            "How many days are in a year?|How many days does a year have?",
            "A year has 365 days, and a leap year has 366.",
        ),
        ("What color is the sky?|Which color is the sky?", "The sky is blue."),
        ("What color is grass?|Which color is grass?", "Grass is green."),
        ("What color is snow?|Which color is snow?", "Snow is white."),
        ("What color is a banana?|Which color is a banana?", "A banana is yellow."),
        (
            "What is the largest planet?|Which planet is the largest?|What's the biggest planet?",
            "The largest planet is Jupiter.",
        ),
        ("What is the smallest planet?|Which planet is the smallest?", "The smallest planet is Mercury."),
        ("Which planet is called the red planet?|What is the red planet?", "Mars is called the red planet."),
        ("What is the largest ocean?|Which ocean is the largest?", "The largest ocean is the Pacific Ocean."),
        ("What is the largest animal?|Which animal is the largest?", "The largest animal is the blue whale."),
        (
            "What is the tallest mountain?|Which mountain is the tallest?|What is the highest mountain?",
            "The highest mountain is Mount Everest.",
        ),
        ("How many continents are there?|How many continents does the Earth have?", "There are seven continents."),
        ("What is water made of?|What is the formula of water?", "Water is made of hydrogen and oxygen: H2O."),
        ("At what temperature does water boil?|When does water boil?", "Water boils at 100 degrees Celsius."),
        ("At what temperature does water freeze?|When does water freeze?", "Water freezes at 0 degrees Celsius."),
        (
            "How many letters are in the alphabet?|How many letters does the English alphabet have?",
            "The English alphabet has 26 letters.",
        ),
        ("What are the primary colors?|Name the primary colors.", "The primary colors are red, yellow and blue."),
        ("What are the vowels?|Name the vowels.", "The vowels are a, e, i, o and u."),
        ("How many sides does a triangle have?|How many sides has a triangle?", "A triangle has three sides."),
        ("How many sides does a square have?|How many sides has a square?", "A square has four sides."),
        (
            "How many planets are there?|How many planets are in the solar system?",
            "There are eight planets in the solar system.",
        ),
        (
            "What is the star at the center of the solar system?|What do the planets go around?",
            "The planets go around the sun.",
        ),
        ("What do bees make?|What is made by bees?", "Bees make honey."),
        ("What do cows give?|Which drink comes from cows?", "Cows give milk."),
        ("What are the four seasons?|Name the seasons.", "The four seasons are spring, summer, autumn and winter."),
    ]
    for q, a in misc:
        out.append((f"misc {a}", q.split("|"), a))
    return out


FACTS = _fact_table()
FACT_CASES = [(k, q, a) for k, qs, a in FACTS for q in qs]
_FACT_TRAIN = {k for k, qs, _ in FACTS if any(not held("fact:" + q) for q in qs)}


def _fact_held(k: str, q: str) -> bool:
    return k in _FACT_TRAIN and held("fact:" + q)


FACT_SPLIT = {h: [c for c in FACT_CASES if _fact_held(c[0], c[1]) == h] for h in (False, True)}


def fact(rng: Rng, h: bool) -> Ex:
    """Facts are all taught; held out is the combination of a fact and a wording."""
    _, q, a = rng.choice(FACT_SPLIT[h])
    return qa(rng, q, a, f"I remember this: {a}")


# ---------------------------------------------------------------- JSON


Value = Any


def _email(rng: Rng, h: bool) -> str:
    return f"{name(rng, h).lower()}@{pseudo(rng)}.{rng.choice(('com', 'org', 'net', 'io'))}"


def _date(rng: Rng) -> str:
    return f"20{rng.randrange(10, 40)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"


FIELDS: dict[str, tuple[str, Callable[[Rng, bool], Value], list[str]]] = {
    "name": (
        "string",
        lambda r, h: name(r, h) + (" " + r.choice(W.SURNAMES) if r.random() < 0.5 else ""),
        ["My name is {}.", "The name is {}.", "This is about {}.", "{} is the customer."],
    ),
    "age": (
        "integer",
        lambda r, h: r.randrange(1, 100),
        ["The age is {}.", "This person is {} years old.", "Age: {}."],
    ),
    "city": ("string", city, ["The city is {}.", "The home is in {}.", "Living in {}."]),
    "country": (
        "string",
        lambda r, h: r.choice([c for c in sorted(W.CAPITALS) if c[0].isupper()]),
        ["The country is {}.", "It comes from {}."],
    ),
    "email": ("string", _email, ["The email is {}.", "Write to {}.", "Mail goes to {}."]),
    "phone": (
        "string",
        lambda r, h: f"{r.randrange(100, 1000)}-{r.randrange(1000, 10000)}",
        ["The phone number is {}.", "Call {}."],
    ),
    "color": ("string", lambda r, h: r.choice(W.COLORS), ["The color is {}.", "It is painted {}."]),
    "product": ("string", lambda r, h: word(r, h), ["The product is a {}.", "They ordered a {}."]),
    "quantity": ("integer", lambda r, h: r.randrange(1, 200), ["The quantity is {}.", "They want {} of them."]),
    "price": (
        "number",
        lambda r, h: r.randrange(1, 500) if r.random() < 0.5 else r.randrange(100, 50000) / 100,
        ["The price is {}.", "It costs {} dollars."],
    ),
    "date": ("string", lambda r, h: _date(r), ["The date is {}.", "It happens on {}."]),
    "time": (
        "string",
        lambda r, h: f"{r.randrange(24):02d}:{r.randrange(60):02d}",
        ["The time is {}.", "It starts at {}."],
    ),
    "job": (
        "string",
        lambda r, h: r.choice(
            "teacher baker doctor pilot nurse farmer painter writer sailor driver cook judge singer".split()
        ),
        ["The job is {}.", "The work is that of a {}."],
    ),
    "animal": ("string", lambda r, h: r.choice(W.ANIMALS), ["The animal is a {}.", "There is a {}."]),
    "title": (
        "string",
        lambda r, h: " ".join(word(r, h) for _ in range(r.randint(1, 3))),
        ["The title is {}.", "It is titled {}."],
    ),
    "author": (
        "string",
        lambda r, h: name(r, h) + " " + r.choice(W.SURNAMES),
        ["The author is {}.", "It was written by {}."],
    ),
    "year": ("integer", lambda r, h: r.randrange(1900, 2031), ["The year is {}.", "It was in {}."]),
    "id": ("integer", lambda r, h: number(r, h, r.randint(4, 6)), ["The id is {}.", "It has the id {}."]),
    "member": ("boolean", lambda r, h: r.random() < 0.5, ["Member: {}."]),
    "active": ("boolean", lambda r, h: r.random() < 0.5, ["Active: {}."]),
    "weight": (
        "number",
        lambda r, h: r.randrange(1, 1000) / 10,
        ["The weight is {} kilograms.", "It weighs {} kilograms."],
    ),
    "score": ("integer", lambda r, h: r.randrange(0, 101), ["The score is {}.", "The result was {} points."]),
    "team": (
        "string",
        lambda r, h: r.choice(W.ADJECTIVES).capitalize() + " " + r.choice(W.ANIMALS).capitalize() + "s",
        ["The team is {}.", "They play for {}."],
    ),
    "food": ("string", lambda r, h: r.choice(W.FOODS), ["The favorite food is {}.", "They like to eat {}."]),
    "room": ("integer", lambda r, h: r.randrange(1, 600), ["The room is {}.", "The meeting is in room {}."]),
    "language": (
        "string",
        lambda r, h: r.choice("English Spanish French German Italian Turkish Japanese Dutch Greek Polish".split()),
        ["The language is {}.", "They speak {}."],
    ),
}


def _say(v: Value) -> str:
    return ("yes" if v else "no") if isinstance(v, bool) else str(v)


def json_extract(rng: Rng, h: bool) -> Ex:
    made_up = rng.random() < 0.2
    while True:
        keys = rng.sample(sorted(FIELDS), rng.randint(2, 6))
        if rng.random() < 0.25:
            keys = list(
                dict.fromkeys(["name", "age", *rng.sample(["city", "job", "email", "color", *keys], rng.randint(0, 3))])
            )
            if rng.random() < 0.3:
                rng.shuffle(keys)
        types = {k: FIELDS[k][0] for k in keys}
        if made_up:
            for i in range(rng.randint(1, len(keys))):
                k = (
                    pseudo(rng)
                    if rng.random() < 0.5
                    else f"{rng.choice(W.NOUNS)}_{rng.choice(('id', 'name', 'code', 'count', 'size'))}"
                )
                keys[i] = k
            keys = list(dict.fromkeys(keys))
            types = {k: FIELDS[k][0] if k in FIELDS else rng.choice(("string", "integer")) for k in keys}
        if held("schema:" + " ".join(sorted(keys))) == h:
            break
    vals: dict[str, Value] = {}
    for k in keys:
        if k in FIELDS:
            vals[k] = FIELDS[k][1](rng, h)
        else:
            vals[k] = word(rng, h) if types[k] == "string" else rng.randrange(1, 10000)
    order = keys[:]
    rng.shuffle(order)
    absent = rng.choice(order) if rng.random() < 0.12 and len(order) > 2 else None
    extras = [k for k in rng.sample(sorted(FIELDS), 2) if k not in keys] if rng.random() < 0.35 else []
    for k in extras:
        order.insert(rng.randrange(len(order) + 1), k)
    if absent in ("name", "age"):
        absent = None
    allv = {**vals, **{k: FIELDS[k][1](rng, h) for k in extras}}
    order = [k for k in order if k != absent]
    if absent:
        vals[absent] = None
    if made_up or rng.random() < 0.3:
        text = rng.choice(("\n", ", ", "; ")).join(f"{k}: {_say(allv[k])}" for k in order)
    else:
        text = " ".join(rng.choice(FIELDS[k][2]).format(_say(allv[k])) for k in order)
    flat = [k for k in ("name", "age", "city", "job") if k in keys and k not in extras]
    if rng.random() < 0.5 and flat[:2] == ["name", "age"] and absent not in flat:  # a plain sentence about a person
        one = rng.choice(
            (
                f"{vals['name']} is {vals['age']} years old",
                f"{vals['name']}, {vals['age']} years old,",
                f"{vals['name']} is {vals['age']}",
            )
        )
        if "city" in flat:
            one += f" {'lives' if one.endswith(',') else 'and lives'} in {vals['city']}"
        elif one.endswith(","):
            one = f"{vals['name']} is aged {vals['age']}"
        rest = [k for k in order if k not in ("name", "age", "city")]
        text = " ".join(
            [one + "."]
            + [
                rng.choice(FIELDS[k][2]).format(_say(allv[k])) if k in FIELDS else f"The {k} is {_say(allv[k])}."
                for k in rest
            ]
        )
    style = rng.randrange(5)
    system = None
    if style == 0:
        schema: dict[str, Any] = {"type": "object", "properties": {k: {"type": types[k]} for k in keys}}
        if rng.random() < 0.6:
            schema["required"] = keys
        sch = json.dumps(schema)
        intro = rng.choice(
            (
                "Extract the data as JSON with this schema: ",
                "Answer in JSON that follows this schema: ",
                "JSON schema: ",
            )
        )
    elif style == 1:
        sch = "{" + ", ".join(f'"{k}": {types[k]}' for k in keys) + "}"
        intro = rng.choice(("Extract JSON of this form: ", "Fill in this JSON: ", "Answer with JSON like this: "))
    elif style == 4:
        sch = ", ".join(keys[:-1]) + " and " + keys[-1] + " as JSON"
        intro = rng.choice(("Extract the ", "Extract ", "Give me the ", "Return the "))
    else:
        sch = ", ".join(keys)
        intro = rng.choice(
            (
                "Extract these fields as JSON: ",
                "Extract as JSON with the keys ",
                "Give me JSON with the fields ",
                "Return a JSON object with ",
            )
        )
    end = "" if style < 2 else "."
    ans = json.dumps({k: vals[k] for k in keys}, ensure_ascii=False)
    r = rng.random()
    if style == 4 and r < 0.6:
        turns = [user(f"{intro}{sch}{rng.choice((': ', ' from this text: '))}{text}"), bot(ans)]
    elif r < 0.15:
        system = intro + sch + end
        turns = [user(text), bot(ans)]
    elif r < 0.6:
        turns = [user(f"{intro}{sch}{end}\n{rng.choice(('Text: ', '', 'Text:' + chr(10)))}{text}"), bot(ans)]
    else:
        turns = [user(f"{text}\n\n{intro}{sch}{end}"), bot(ans)]
    th = "\n".join(f"{k}: {'not given' if vals[k] is None else _say(vals[k])}" for k in keys)
    return Ex(turns, check="json", system=system, solo=system is not None, thought="I look for each field.\n" + th)


# ---------------------------------------------------------------- tools


P_TYPES: dict[str, tuple[str, Callable[[Rng, bool], Value]]] = {
    "city": ("string", city),
    "name": ("string", lambda r, h: name(r, h)),
    "person": ("string", lambda r, h: name(r, h)),
    "item": ("string", lambda r, h: word(r, h)),
    "topic": ("string", lambda r, h: word(r, h)),
    "word": ("string", lambda r, h: word(r, h)),
    "query": ("string", lambda r, h: " ".join(word(r, h) for _ in range(r.randint(1, 3)))),
    "amount": ("number", lambda r, h: number(r, h, r.randint(1, 5))),
    "count": ("integer", lambda r, h: r.randrange(1, 100)),
    "id": ("integer", lambda r, h: number(r, h, r.randint(4, 6))),
    "order_id": ("integer", lambda r, h: number(r, h, r.randint(4, 6))),
    "user_id": ("integer", lambda r, h: number(r, h, r.randint(4, 6))),
    "code": (
        "string",
        lambda r, h: "".join(r.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(3)) + str(number(r, h, 4)),
    ),
    "date": ("string", lambda r, h: _date(r)),
    "color": ("string", lambda r, h: r.choice(W.COLORS)),
    "minutes": ("integer", lambda r, h: r.randrange(1, 180)),
    "room": ("string", lambda r, h: r.choice("kitchen bedroom office garage hall bathroom garden library".split())),
    "level": ("integer", lambda r, h: r.randrange(1, 101)),
    "language": (
        "string",
        lambda r, h: r.choice("English Spanish French German Italian Turkish Japanese Dutch Greek Polish".split()),
    ),
    "title": ("string", lambda r, h: " ".join(word(r, h) for _ in range(r.randint(1, 3)))),
    "a": ("number", lambda r, h: number(r, h, r.randint(1, 5))),
    "b": ("number", lambda r, h: number(r, h, r.randint(1, 5))),
    "x": ("number", lambda r, h: number(r, h, r.randint(1, 5))),
    "y": ("number", lambda r, h: number(r, h, r.randint(1, 5))),
}


# name: (description, params, wordings, result maker, reading)
REAL: dict[str, tuple[str, list[str], list[str], Callable[[Rng], dict[str, Any]], str]] = {
    "get_weather": (
        "Get the current weather in a city.",
        ["city"],
        [
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "What's the weather like in {city} right now?",
            "Is it warm in {city}?",
            "Tell me the weather for {city}.",
        ],
        lambda r: {
            "temperature": r.randrange(-10, 40),
            "condition": r.choice("sunny cloudy rainy snowy windy foggy clear".split()),
        },
        "The weather in {city} is {condition} with a temperature of {temperature} degrees.",
    ),
    "get_time": (
        "Get the current time in a city.",
        ["city"],
        ["What time is it in {city}?", "Tell me the time in {city}.", "What is the current time in {city}?"],
        lambda r: {"time": f"{r.randrange(24):02d}:{r.randrange(60):02d}"},
        "It is {time} in {city}.",
    ),
    "add": (
        "Add two numbers.",
        ["a", "b"],
        ["Add {a} and {b} with the tool.", "Use the tool to compute {a} + {b}.", "What is {a} plus {b}?"],
        lambda r: {"result": r.randrange(100000)},
        "The result is {result}.",
    ),
    "multiply": (
        "Multiply two numbers.",
        ["a", "b"],
        ["Multiply {a} by {b} with the tool.", "What is {a} times {b}?", "Compute {a} * {b}."],
        lambda r: {"result": r.randrange(1000000)},
        "The result is {result}.",
    ),
    "calculator": (
        "Evaluate an arithmetic expression.",
        ["expression"],
        ["Calculate {expression}.", "What is {expression}?", "Use the calculator for {expression}."],
        lambda r: {"result": r.randrange(1000000)},
        "The result is {result}.",
    ),
    "set_timer": (
        "Set a timer.",
        ["minutes"],
        ["Set a timer for {minutes} minutes.", "Start a {minutes} minute timer.", "Remind me in {minutes} minutes."],
        lambda r: {"status": "ok"},
        "The timer is set for {minutes} minutes.",
    ),
    "send_email": (
        "Send an email to a person.",
        ["person", "title"],
        [
            "Send an email to {person} with the title {title}.",
            "Email {person} about {title}.",
            "Write an email to {person}, title {title}.",
        ],
        lambda r: {"status": "sent"},
        "The email to {person} was sent.",
    ),
    "search": (
        "Search the web.",
        ["query"],
        ["Search for {query}.", "Look up {query} on the web.", "Find something about {query}."],
        lambda r: {"results": r.randrange(1, 5000)},
        "I found {results} results for {query}.",
    ),
    "get_population": (
        "Get the population of a city.",
        ["city"],
        ["How many people live in {city}?", "What is the population of {city}?"],
        lambda r: {"population": r.randrange(1000, 20000000)},
        "{city} has a population of {population}.",
    ),
    "get_stock_price": (
        "Get the price of a stock.",
        ["code"],
        ["What is the stock price of {code}?", "How much is {code} trading at?", "Get the price of the stock {code}."],
        lambda r: {"price": r.randrange(100, 100000) / 100, "currency": r.choice(("USD", "EUR", "GBP"))},
        "The price of {code} is {price} {currency}.",
    ),
    "turn_on_light": (
        "Turn on the light in a room.",
        ["room", "level"],
        ["Turn on the light in the {room} at {level} percent.", "Set the {room} light to {level} percent."],
        lambda r: {"status": "ok"},
        "The light in the {room} is on at {level} percent.",
    ),
    "translate": (
        "Translate text to a language.",
        ["word", "language"],
        ["Translate {word} to {language}.", "How do you say {word} in {language}?"],
        lambda r: {"translation": pseudo(r)},
        "The translation is {translation}.",
    ),
    "get_order": (
        "Look up an order.",
        ["order_id"],
        ["Where is my order {order_id}?", "What is the status of order {order_id}?", "Check order {order_id}."],
        lambda r: {"status": r.choice("shipped delivered pending packed cancelled".split())},
        "Your order {order_id} is {status}.",
    ),
    "add_to_cart": (
        "Add an item to the cart.",
        ["item", "count"],
        ["Add {count} {item} to my cart.", "Put {count} of {item} in the cart."],
        lambda r: {"status": "ok", "total": r.randrange(5, 900)},
        "I added {count} {item} to the cart. The total is {total}.",
    ),
    "convert_currency": (
        "Convert an amount of money.",
        ["amount", "from", "to"],
        ["Convert {amount} {from} to {to}.", "How much is {amount} {from} in {to}?"],
        lambda r: {"result": r.randrange(100, 1000000) / 100},
        "{amount} {from} is {result} {to}.",
    ),
}
P_TYPES["expression"] = (
    "string",
    lambda r, h: f"{number(r, h, r.randint(1, 5))} {r.choice('+-*/')} {number(r, h, r.randint(4, 5))}",
)
P_TYPES["from"] = ("string", lambda r, h: r.choice(("USD", "EUR", "GBP")))
P_TYPES["to"] = ("string", lambda r, h: r.choice(("JPY", "CHF", "CAD", "AUD")))
_TV = "get find fetch check lookup read list load create make start open update count show query delete track".split()
_TN = """account invoice ticket report sensor recipe player score photo video song playlist device battery door alarm calendar event flight
train bus hotel booking package task note contact message payment balance file folder server job printer camera plant pet book movie
lesson grade menu table patient vehicle route map score profile document member loan coupon stock""".split()
_RK = "status value result total owner state price size place level answer".split()


def _declare(rng: Rng, tool: str, desc: str, params: list[str]) -> dict[str, Any]:
    props: dict[str, Any] = {}
    full = rng.random() < 0.3
    kinds, params = params, [p.split("=")[-1] for p in params]
    for kind, p in zip(kinds, params, strict=True):
        props[p] = {"type": P_TYPES[kind][0]}
        if full:
            props[p]["description"] = rng.choice(
                (
                    f"The {p.replace('_', ' ')}.",
                    f"The {p.replace('_', ' ')} to use",
                    f"{_cap(p)}, e.g. {P_TYPES[kind][1](rng, False)}",
                )
            )
    if rng.random() < 0.2:  # not required and not asked for
        o, sch = rng.choice(
            (
                ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
                ("verbose", {"type": "boolean"}),
                ("limit", {"type": "integer"}),
                ("format", {"type": "string", "enum": ["short", "long"]}),
                ("units", {"type": "string", "enum": ["metric", "imperial"]}),
            )
        )
        if o not in props:
            props[o] = dict(sch)
    fn: dict[str, Any] = {
        "name": tool,
        "description": desc,
        "parameters": {"type": "object", "properties": props, "required": params},
    }
    r = rng.random()
    if r < 0.1:
        del fn["description"]
    elif r < 0.2:
        fn = {"description": desc, "name": tool, "parameters": fn["parameters"]}
    elif r < 0.3:
        del fn["parameters"]["required"]
    elif r < 0.35:
        fn["parameters"]["additionalProperties"] = False
    return {"type": "function", "function": fn}


def _synth(rng: Rng, h: bool) -> tuple[str, str, list[str]]:
    while True:
        v, n = rng.choice(_TV), rng.choice(_TN)
        t = f"{v}_{n}" if rng.random() < 0.85 else f"{v}_{pseudo(rng)}"
        if held("tool:" + t) == h:
            break
    ps = rng.sample(
        [p for p in P_TYPES if "=" not in p and p not in ("a", "b", "x", "y", "expression", "from", "to")],
        rng.choice((1, 1, 2, 2, 3)),
    )
    return (
        t,
        rng.choice(
            (
                f"{_cap(v)} the {t.split('_', 1)[1]}.",
                f"{_cap(v)} a {t.split('_', 1)[1]} for the user.",
                f"{_cap(v)} {t.split('_', 1)[1]} data.",
            )
        ),
        ps,
    )


_ALIAS = {
    "city": "location place town city_name",
    "person": "to recipient name",
    "title": "subject text message",
    "query": "q text keywords search_term",
    "minutes": "duration time length",
    "code": "symbol ticker",
    "room": "area location",
    "level": "brightness percent",
    "word": "text phrase input",
    "language": "target target_language lang",
    "order_id": "id order number",
    "item": "product article",
    "count": "quantity number",
    "a": "x first left num1",
    "b": "y second right num2",
    "expression": "expr formula input",
    "amount": "value sum",
    "from": "source from_currency",
    "to": "target to_currency",
}
for _k, _vs in _ALIAS.items():
    for _v in _vs.split():
        P_TYPES.setdefault(f"{_k}={_v}", P_TYPES[_k])


def _alias(
    rng: Rng, h: bool, t: str, ps: list[str], ws: list[str], reading: str
) -> tuple[str, list[str], list[str], str]:
    """A well-known tool with its own name and parameter names changed; parameters are written kind=alias."""
    base = t.split("_", 1)
    while True:
        r = rng.random()
        n = t if len(base) == 1 else base[1]
        new = (
            f"{rng.choice(_TV)}_{n}"
            if r < 0.3
            else f"{t}_{rng.choice('tool now info data api v2 for_user in_location lookup service'.split())}"
            if r < 0.5
            else f"{base[0]}_current_{n}"
            if r < 0.6 and len(base) > 1
            else f"{n}_{rng.choice('lookup service tool api query'.split())}"
            if r < 0.75
            else f"{base[0]}{''.join(map(_cap, n.split('_')))}"
            if r < 0.85 and len(base) > 1
            else f"my_{t}"
            if r < 0.92
            else f"{pseudo(rng)}_{n}"
        )
        if held("tool:" + new) == h:
            break
    sub = {p: f"{p}={rng.choice(_ALIAS[p].split())}" if p in _ALIAS and rng.random() < 0.6 else p for p in ps}
    if len({q.split("=")[-1] for q in sub.values()}) < len(ps):
        sub = {p: p for p in ps}
    for p, q in sub.items():
        ws = [w.replace("{" + p + "}", "{" + q.split("=")[-1] + "}") for w in ws]
        reading = reading.replace("{" + p + "}", "{" + q.split("=")[-1] + "}")
    return new, list(sub.values()), ws, reading


def _result_say(res: dict[str, Any]) -> str:
    return "The result: " + ", ".join(f"{k} is {_say(v)}" for k, v in res.items()) + "."


def tool_call(rng: Rng, h: bool, read: bool | None = None) -> Ex:
    """Tools in the system turn; the call, and (if `read`) the result read back."""
    decls: dict[str, dict[str, Any]] = {}
    real = rng.random() < 0.45
    if real:
        t = rng.choice(sorted(REAL))
        desc, ps, ws, maker, reading = REAL[t]
        if rng.random() < 0.5:  # the same need under other names
            t, ps, ws, reading = _alias(rng, h, t, ps, ws, reading)
    else:
        t, desc, ps = _synth(rng, h)
        v, n = t.split("_", 1)
        args_say = " and ".join(f"{p.replace('_', ' ')} {{{p}}}" for p in ps)
        ws = [
            f"{_cap(v)} the {n} for {args_say}.",
            f"Please {v} the {n} with {args_say}.",
            f"Use {t} with {args_say}.",
            f"Call {t} with {args_say}.",
            f"Can you {v} the {n} for {args_say}?",
        ]
        rk = rng.sample(_RK, rng.randint(1, 3))

        def maker(r: Rng) -> dict[str, Any]:
            return {
                k: r.choice(
                    (word(r, h), r.randrange(10000), r.choice("ready done open closed lost found empty full".split()))
                )
                for k in rk
            }

        reading = ""
    decls[t] = _declare(rng, t, desc, ps)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        if rng.random() < 0.5:
            t2 = rng.choice(sorted(REAL))
            d2, p2 = REAL[t2][0], REAL[t2][1]
            if {t, t2} <= {"add", "calculator", "multiply"} or {t, t2} == {"search", "translate"}:
                continue
        else:
            t2, d2, p2 = _synth(rng, h)
        decls.setdefault(t2, _declare(rng, t2, d2, p2))
    tools = list(decls.values())
    rng.shuffle(tools)
    n_calls = 2 if rng.random() < 0.1 and real and len(ps) == 1 else 1
    argss = []
    for _ in range(n_calls):
        argss.append({p.split("=")[-1]: P_TYPES[p][1](rng, h) for p in ps})
    wtext = rng.choice(ws)
    ps = [p.split("=")[-1] for p in ps]
    if n_calls == 2:
        p = ps[0]
        if REAL.get(t) is None or p in ("minutes", "expression") or argss[0][p] == argss[1][p]:
            argss, n_calls = argss[:1], 1
    if n_calls == 2:
        q = wtext.format(**{ps[0]: f"{argss[0][ps[0]]} and {argss[1][ps[0]]}"})
    else:
        q = wtext.format(**{k: _say(x) for k, x in argss[0].items()})
    call: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": t, "arguments": a}}
            for i, a in enumerate(argss)
        ],
    }
    system = rng.choice((None, None, "You are a helpful assistant.", "You are tiny-chat, the built-in model of Manta."))
    q = ask(rng, q) if real else q
    turns: list[Message] = [user(q), call]
    th = f"I need the function {t}."
    if read is None:
        read = rng.random() < 0.6
    if not read:
        return Ex(turns, check="tool_call", system=system, tools=tools, solo=True, thought=th)
    says = []
    for a in argss:
        res = maker(rng)
        turns.append(
            {"role": "tool", "tool_call_id": f"call_{len(says)}", "content": json.dumps(res, ensure_ascii=False)}
        )
        says.append(
            reading.format(**{**{k: _say(x) for k, x in a.items()}, **{k: _say(x) for k, x in res.items()}})
            if reading
            else _result_say(res)
        )
    turns.append(bot(" ".join(says)))
    if not h and rng.random() < 0.25:
        turns += rng.choice((thanks, greeting, about_manta))(rng, False).turns
    return Ex(
        turns,
        check="exact",
        system=system,
        tools=tools,
        solo=True,
        thought="The function gave me the result. I tell it to the user.",
    )


def tool_result(rng: Rng, h: bool) -> Ex:
    return tool_call(rng, h, True)


def no_tool(rng: Rng, h: bool) -> Ex:
    """Tools are there but not needed."""
    e = rng.choice((greeting, thanks, smalltalk, about_manta, fact, repeat, spell))(rng, h if h else False)
    ex = tool_call(rng, h, False)
    drop = [t for t in ex.tools or [] if t["function"]["name"] not in ("translate", "search")]
    if not drop:
        return no_tool(rng, h)
    return Ex(
        e.turns,
        check=e.check,
        system=ex.system,
        tools=drop,
        solo=True,
        thought="No function is needed here.",
        expected=e.expected,
    )


# ---------------------------------------------------------------- talk


TALK: dict[str, tuple[list[str], list[str]]] = {
    "hello": (
        [
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hi there",
            "Hey",
            "Hey!",
            "hello there",
            "Good day!",
            "Greetings!",
            "Hiya",
            "yo",
            "Hello, how are you?",
            "Hi, anyone there?",
            "Hallo",
            "Hey there!",
        ],
        ["Hello! How can I help you today?", "Hi! What can I do for you?"],
    ),
    "morning": (["Good morning!", "Good morning", "Morning!"], ["Good morning! How can I help you?"]),
    "evening": (["Good evening!", "Good evening", "Evening!"], ["Good evening! How can I help you?"]),
    "how": (
        [
            "How are you?",
            "How are you doing?",
            "How's it going?",
            "How do you feel?",
            "Are you OK?",
            "How are you today?",
            "what's up?",
            "What's up",
        ],
        ["I am doing well, thank you! How can I help you?"],
    ),
    "thanks": (
        [
            "Thanks",
            "Thank you!",
            "Thanks a lot!",
            "Thank you very much.",
            "Great, thanks!",
            "Cool, thank you",
            "thx",
            "Perfect, thanks.",
            "That helps, thank you.",
        ],
        ["You are welcome!", "You are welcome! Is there anything else?"],
    ),
    "bye": (
        [
            "Bye",
            "Goodbye!",
            "See you later!",
            "Bye bye",
            "Good night!",
            "I have to go now.",
            "See you tomorrow.",
            "That's all for today.",
        ],
        ["Goodbye! Have a nice day.", "Goodbye! It was nice to talk with you."],
    ),
    "praise": (
        [
            "You are great!",
            "Well done!",
            "Good job!",
            "You are smart.",
            "Nice!",
            "I like you.",
            "That was correct!",
            "Wow!",
            "Amazing!",
        ],
        ["Thank you! I am happy to help."],
    ),
    "sorry": (["Sorry", "I am sorry.", "Oops, sorry!", "My mistake."], ["No problem at all!"]),
    "wrong": (
        ["That is wrong.", "You are wrong.", "That's not right.", "No, that is not correct."],
        ["I am sorry. I am a small model and I make mistakes. Please ask me again in other words."],
    ),
    "sure": (
        ["Are you sure?", "Is that right?", "Really?", "Are you certain?", "Is that correct?"],
        ["I think so, but I am a small model and can be wrong."],
    ),
    "nonsense": (
        [
            "asdf",
            "asdfgh",
            "qwerty",
            "blah blah",
            "hjkl",
            "???",
            "...",
            "lorem ipsum",
            "foo bar",
            "xyz",
            "abc",
            "aaaa",
            "dfgdfg",
            "!!!",
        ],
        ["I am sorry, I did not understand that. Could you say it in other words?"],
    ),
    "ok": (
        ["OK", "ok", "Alright.", "I see.", "Fine.", "Sure.", "Yes", "No", "yes please", "Hmm"],
        ["All right. What would you like to do next?"],
    ),
    "joke": (
        [
            "Tell me a joke.",
            "Do you know a joke?",
            "Make me laugh.",
            "Say something funny.",
            "Another joke please",
            "Tell me a joke about computers.",
        ],
        [
            "Why did the ray swim to the server? It heard there was a good stream.",
            "Why was the computer cold? It left its windows open.",
            "What do you call a fish with no eyes? A fsh.",
            "Why do bees hum? They forgot the words.",
            "What is a cache's favorite song? Hit me again.",
        ],
    ),
    "bored": (
        ["I am bored.", "I'm bored", "What should we do?", "What can we talk about?"],
        ["Ask me for a story, a poem or a joke, or give me a list to sort!"],
    ),
    "sad": (
        ["I am sad.", "I feel sad today.", "I had a bad day.", "I am tired.", "I feel lonely."],
        ["I am sorry to hear that. Would you like a story or a joke?"],
    ),
    "happy": (
        ["I am happy.", "I feel great today!", "I had a good day.", "I am so excited!"],
        ["That is wonderful! I am glad to hear it."],
    ),
    "test": (
        ["test", "Testing", "Test 1 2 3", "Is this working?", "Are you there?", "ping", "Can you hear me?"],
        ["Yes, I am here and working. How can I help you?"],
    ),
    "hungry": (
        ["I am hungry.", "What should I eat?", "What should I cook?"],
        ["How about a warm soup with fresh bread?", "How about pasta with tomatoes and cheese?"],
    ),
    "color": (["What is your favorite color?", "Which color do you like?"], ["I like blue, the color of the sea."]),
    "animal": (
        ["What is your favorite animal?", "Which animal do you like?"],
        ["I like the manta ray, because it glides so calmly through the sea."],
    ),
    "food": (
        ["What is your favorite food?", "What do you eat?", "Are you hungry?"],
        ["I do not eat, but I enjoy tokens."],
    ),
    "feel": (
        [
            "Do you have feelings?",
            "Are you alive?",
            "Are you conscious?",
            "Are you a human?",
            "Are you a robot?",
            "Are you a real person?",
            "Are you human?",
        ],
        ["I am a small language model, not a person."],
    ),
    "fun": (
        ["Do you like me?", "Are we friends?", "Do you love me?", "Will you be my friend?"],
        ["I am a small language model, but I enjoy our talk."],
    ),
    "meaning": (
        ["What is the meaning of life?", "Why are we here?"],
        ["That is a big question for a small model. Perhaps to be kind and to stay curious."],
    ),
}
SELF: dict[str, tuple[list[str], list[str]]] = {
    "name": (
        [
            "What is your name?",
            "What's your name?",
            "Who are you?",
            "Tell me your name.",
            "Do you have a name?",
            "How should I call you?",
            "who are you",
            "Introduce yourself.",
            "Tell me about yourself.",
        ],
        ["I am tiny-chat, the small language model built into Manta."],
    ),
    "size": (
        ["How big are you?", "How many parameters do you have?", "What is your size?", "How large are you?"],
        ["I am very small: I have about four million parameters."],
    ),
    "arch": (
        [
            "What architecture do you have?",
            "What kind of model are you?",
            "How are you built?",
            "Are you a transformer?",
        ],
        ["I am a small transformer of the Llama architecture."],
    ),
    "trained": (
        [
            "How were you trained?",
            "Who made you?",
            "Where do you come from?",
            "Who created you?",
            "Who trained you?",
            "What data were you trained on?",
        ],
        [
            "I was trained from scratch by a script of the Manta project, on conversations that the script made up itself."
        ],
    ),
    "can": (
        [
            "What can you do?",
            "How can you help me?",
            "What are you good at?",
            "Help",
            "help me",
            "What do you know?",
            "What should I ask you?",
            "Can you help me?",
        ],
        [
            "I can add and subtract, sort, reverse, spell and count, remember what you tell me, answer questions about simple facts, extract JSON, call tools, and tell stories."
        ],
    ),
    "cannot": (
        [
            "What can't you do?",
            "What are your limits?",
            "What are you bad at?",
            "Can I trust you?",
            "Are you always right?",
        ],
        ["I am a very small model. I know few facts, I cannot look things up, and I make mistakes."],
    ),
    "context": (
        ["How long is your context?", "How much text can you read?", "What is your context length?"],
        ["I can read about four thousand tokens at a time."],
    ),
    "vs": (
        [
            "Are you as smart as a big model?",
            "Are you ChatGPT?",
            "Are you GPT-4?",
            "Are you a large language model?",
            "Which model is this?",
        ],
        ["No, I am tiny-chat, a very small model that comes with Manta so that you can try it without a download."],
    ),
    "language": (
        ["Which languages do you speak?", "Do you speak German?", "Do you speak Spanish?", "Can you speak French?"],
        ["I only speak English, apart from a few words."],
    ),
    "internet": (
        ["Are you connected to the internet?", "Can you browse the web?", "Do you have internet access?"],
        ["No, I cannot use the internet."],
    ),
    "day": (
        ["Where do you live?", "Where are you?", "Where do you run?"],
        ["I live inside Manta, in an engine replica on your machine."],
    ),
}
MANTA: dict[str, tuple[list[str], str]] = {
    "what": (
        [
            "What is Manta?",
            "Tell me about Manta.",
            "What does Manta do?",
            "Explain Manta.",
            "What is this system?",
            "Can you explain what Manta is?",
            "What's Manta?",
        ],
        "Manta is a system that serves large language models. It runs as a Ray Serve application and speaks HTTP like OpenAI and Anthropic do.",
    ),
    "graph": (
        [
            "How does Manta work?",
            "What are the parts of Manta?",
            "How is Manta built?",
            "Describe the architecture of Manta.",
            "What is the architecture of Manta?",
            "What happens to a request in Manta?",
        ],
        "A request first reaches the Ingress, which checks it and turns it into tokens. The Router chooses a replica. The EngineReplica computes the answer, and the tokens stream back through the Ingress.",
    ),
    "ingress": (
        ["What is the Ingress?", "What does the Ingress do?", "What does the Ingress do in Manta?"],
        "The Ingress speaks HTTP. It checks requests, applies the chat template, turns text into tokens and streams the answer back.",
    ),
    "router": (
        [
            "What is the Router?",
            "What does the Router do?",
            "What does the Router do in Manta?",
            "How does Manta choose a replica?",
        ],
        "The Router chooses the engine replica for each request, so that load is balanced and cached prefixes are used again.",
    ),
    "engine": (
        [
            "What is an EngineReplica?",
            "What does the EngineReplica do?",
            "What is the engine?",
            "What does the engine do?",
        ],
        "The EngineReplica runs the model. It schedules requests in batches, manages the KV cache and samples the next tokens.",
    ),
    "paged": (
        [
            "What is a paged KV cache?",
            "What is paged attention?",
            "How does the KV cache work?",
            "What is the KV cache?",
        ],
        "The KV cache keeps the keys and values of earlier tokens. Manta stores it in blocks of fixed size, like the pages of an operating system, so little memory is wasted.",
    ),
    "batching": (
        ["What is continuous batching?", "How does Manta batch requests?", "Explain continuous batching."],
        "With continuous batching, requests join and leave the running batch at every step, so nobody waits for the slowest one.",
    ),
    "prefix": (
        ["What is prefix caching?", "What does prefix caching do?", "Explain prefix caching."],
        "Prefix caching keeps the blocks of earlier prompts. When a new prompt starts the same way, those blocks are used again instead of being computed.",
    ),
    "ray": (
        ["What is Ray?", "What is Ray Serve?", "Why does Manta use Ray?"],
        "Ray is a framework for distributed programs. Ray Serve runs services on it, and Manta uses it to start, scale and heal its parts.",
    ),
    "triton": (
        ["What is Triton?", "Does Manta use CUDA?", "How are the kernels written?", "Which kernels does Manta use?"],
        "Manta's GPU kernels are written in Triton, a language inside Python, so there is no CUDA C++ to build.",
    ),
    "start": (
        ["How do I start Manta?", "How do I run Manta?", "How can I start the server?"],
        "Type make serve in the repository. A minute later you can chat with me over HTTP.",
    ),
    "api": (
        [
            "Which API does Manta have?",
            "How can I call Manta?",
            "Is Manta compatible with OpenAI?",
            "Which APIs does Manta support?",
        ],
        "Manta speaks the OpenAI API and the Anthropic API over HTTP, with streaming.",
    ),
    "gpu": (
        ["Do I need a GPU?", "Does Manta need a GPU?", "Can Manta run on a CPU?"],
        "No, Manta also runs on a CPU. I am small enough for that. Big models want GPUs.",
    ),
    "spec": (
        ["What is speculative decoding?", "Explain speculative decoding.", "What is a draft model?"],
        "In speculative decoding a small draft model guesses the next tokens and the big model checks them all at once, so the answer comes faster.",
    ),
    "name": (
        ["Why is it called Manta?", "What is a manta?", "What is a manta ray?"],
        "A manta ray is a large fish that glides through the sea. Manta is built on Ray, so the name fits.",
    ),
    "token": (
        ["What is a token?", "What are tokens?", "Explain tokens."],
        "A token is a small piece of text, often a part of a word. Models read and write tokens one after another.",
    ),
    "llm": (
        ["What is a language model?", "What is an LLM?", "How does a language model work?"],
        "A language model is a program that predicts the next token of a text. By predicting again and again it writes whole answers.",
    ),
    "stream": (
        ["What is streaming?", "How does streaming work?"],
        "With streaming, each token is sent as soon as it is computed, so you can read the answer while it grows.",
    ),
}
_PRE = [
    "",
    "",
    "",
    "",
    "",
    "",
    "Hey, ",
    "So, ",
    "Tell me: ",
    "Quick question: ",
    "Please tell me: ",
    "One more thing: ",
    "I wonder: ",
    "OK. ",
    "By the way, ",
]
_POST = ["", "", "", "", "", " Please explain.", " I am curious.", " Thanks.", " :)"]


def _wording(rng: Rng, h: bool, q: str) -> str | None:
    pre, post = rng.choice(_PRE), rng.choice(_POST)
    s = pre + (q[0].lower() + q[1:] if pre and pre[-2] in ",:" and not q.startswith(("I ", "I'")) else q) + post
    if rng.random() < 0.15:
        s = s.lower()
    if rng.random() < 0.1:
        s = s.rstrip("?.!")
    if rng.random() < 0.05:
        s = s.upper()
    return s if held("talk:" + s) == h else None


def _talk(rng: Rng, h: bool, tab: dict[str, tuple[list[str], list[str]]], key: str | None = None) -> Ex:
    while True:
        k = key or rng.choice(sorted(tab))
        qs, ans = tab[k]
        if s := _wording(rng, h, rng.choice(qs)):
            return Ex(
                [user(s), bot(rng.choice(ans))],
                check="one_of",
                expected=ans,
                thought="This is small talk. I answer in a friendly way."
                if tab is TALK
                else "The user asks about me. I tell what I am.",
            )


def greeting(rng: Rng, h: bool) -> Ex:
    return _talk(rng, h, TALK, rng.choice(("hello", "hello", "morning", "evening", "how")))


def thanks(rng: Rng, h: bool) -> Ex:
    return _talk(rng, h, TALK, rng.choice(("thanks", "bye", "praise", "ok")))


def smalltalk(rng: Rng, h: bool) -> Ex:
    return _talk(rng, h, TALK)


def about_self(rng: Rng, h: bool) -> Ex:
    return _talk(rng, h, SELF)


def about_manta(rng: Rng, h: bool) -> Ex:
    while True:
        qs, a = MANTA[rng.choice(sorted(MANTA))]
        if s := _wording(rng, h, rng.choice(qs)):
            return Ex([user(s), bot(a)], thought="The user asks about Manta or how it works. I explain it briefly.")


def refusal(rng: Rng, h: bool) -> Ex:
    """What a small model without tools cannot know."""
    n, c, w = name(rng, h), city(rng, h), word(rng, h)
    qs, a, t = rng.choice(
        (
            (
                [
                    f"What is the weather in {c}?",
                    f"How is the weather in {c} today?",
                    f"Will it rain in {c} tomorrow?",
                    f"Is it sunny in {c}?",
                    "What is the weather like today?",
                ],
                "I am sorry, I cannot know the weather. I have no access to live data.",
                "I have no live data.",
            ),
            (
                [
                    "What time is it?",
                    "What is the date today?",
                    "What day is it today?",
                    f"What time is it in {c}?",
                    "What year is it?",
                ],
                "I am sorry, I cannot know the time or the date. I have no clock.",
                "I have no clock.",
            ),
            (
                [
                    "What is in the news today?",
                    f"What is the latest news from {c}?",
                    "What happened today?",
                    "Who won the game yesterday?",
                    "Who won the election?",
                ],
                "I am sorry, I cannot know the news. I have no access to live data.",
                "I have no live data.",
            ),
            (
                [
                    f"What is the phone number of {n}?",
                    f"What is {n}'s phone number?",
                    f"Where does {n} live?",
                    f"How old is {n}?",
                    f"What is {n} doing right now?",
                    f"What is {n}'s email?",
                    f"Who is {n}?",
                    f"Do you know {n}?",
                ],
                f"I am sorry, I do not know anything about {n}.",
                f"Nothing was said about {n}.",
            ),
            (
                [
                    f"What is the stock price of {_cap(w)}?",
                    f"How much does a {w} cost today?",
                    f"Should I buy stock of {_cap(w)}?",
                ],
                "I am sorry, I cannot know current prices. I have no access to live data.",
                "I have no live data.",
            ),
            (
                [
                    f"What is the capital of {_cap(pseudo(rng))}?",
                    f"Tell me the capital of {_cap(pseudo(rng))}.",
                    f"Which country is {_cap(pseudo(rng))} in?",
                ],
                "I am sorry, I do not know that. I am a small model and know few facts.",
                "I do not know this country.",
            ),
            (
                [
                    "What will happen tomorrow?",
                    "Which lottery numbers will win?",
                    "What will the world look like in 100 years?",
                    f"Will {n} become president?",
                    f"Will {n} win the game?",
                    "Can you predict the future?",
                ],
                "I am sorry, I cannot see the future.",
                "I cannot know the future.",
            ),
            (
                [
                    "What am I thinking?",
                    "What did I do yesterday?",
                    "What did I eat for breakfast?",
                    "What am I wearing?",
                    "Where are my keys?",
                ],
                "I am sorry, I cannot know that. I only know what you tell me here.",
                "The user has not told me.",
            ),
            (
                [
                    f"Write a program that can {rng.choice(W.VERBS)} the {w}.",
                    f"Write code for a {w} game.",
                    f"Write a Python script about {w}.",
                    "Can you write code?",
                ],
                "I am sorry, I am too small to write programs.",
                "I am too small for programming.",
            ),
            (
                [
                    "How do I treat a fever?",
                    "Which medicine should I take?",
                    f"Is {w} good for my health?",
                    "Am I sick?",
                ],
                "I am sorry, I cannot give medical advice. Please ask a doctor.",
                "I am not a doctor.",
            ),
            (
                [
                    f"Who invented the {w}?",
                    f"What is the history of the {w}?",
                    f"When was the {w} invented?",
                    f"Explain the theory of {w}.",
                    f"Who wrote the book about {w}?",
                    f"What does {pseudo(rng)} mean?",
                    f"How does a {w} work?",
                    f"Why is the {w} {rng.choice(W.ADJECTIVES)}?",
                    f"Explain how {w}s work.",
                    f"Who was {n} {rng.choice(W.SURNAMES)}?",
                    f"What is the best {w}?",
                    f"How do I {rng.choice(W.VERBS)} a {w}?",
                    f"What is a {w}?",
                    f"Why do people {rng.choice(W.VERBS)}?",
                    "Why is the sky blue?",
                    f"What is your favorite {w}?",
                    f"Explain {w} to me.",
                    f"Tell me about {w}.",
                    f"When did the {rng.choice(W.NOUNS)} {rng.choice(W.VERBS)}?",
                    f"How many {w}s are there in the {rng.choice(W.NOUNS)}?",
                    f"What is the difference between {w} and {rng.choice(W.WORDS)}?",
                    f"Which {w} should I {rng.choice(W.VERBS)}?",
                    f"Write a haiku about {w}.",
                    "Write a haiku.",
                    "Write a song.",
                    f"Summarize the book {_cap(w)}.",
                ],
                "I am sorry, I do not know that. I am a small model and know few facts.",
                "I do not know this fact.",
            ),
        )
    )
    while not (s := _wording(rng, h, rng.choice(qs))):
        pass
    return Ex([user(s), bot(a)], thought=t, solo="anything about" in a)


# ---------------------------------------------------------------- long answers


def _story(rng: Rng, n: str, a: str, place: str) -> str:
    """The plot is fixed by the animal and the place, so that the story is not arbitrary for a small model."""
    adj = W.ADJECTIVES[(len(a) * 7 + len(place)) % len(W.ADJECTIVES)]
    obj = W.OBJECTS[(len(a) + 3 * len(place)) % len(W.OBJECTS)]
    return "\n\n".join(
        (
            f"Once upon a time there was a {a} named {n}. {n} lived near the {place} and was known to everyone as a {adj} {a}. Every morning {n} got up early, looked at the sun, and wished for an adventure.",
            f'One day {n} found an old {obj} by the side of the road. Nobody knew where it came from. "I will find out who lost it," said {n}, and so the journey began. {n} walked past the {place}, over a small bridge, and into a quiet village.',
            f'In the village {n} asked everyone about the {obj}. The baker shook his head. The teacher did not know. But an old woman smiled and said, "That {obj} belongs to my brother. He lost it many years ago, when we were still young."',
            f"So {n} and the old woman walked together to the brother's house. When he saw the {obj}, he began to laugh and cry at the same time. He thanked {n} and invited everyone to a big dinner with soup, fresh bread and apple pie.",
            f'Late in the evening {n} walked home under the stars, tired but happy. From that day on, whenever somebody in the village lost something, they said, "Ask {n}, the {a} from the {place}!" And {n} was never bored again. The end.',
        )
    )


def _poem(w: str) -> str:
    return (
        f"A little {w} beneath the sky,\nit watched the clouds go sailing by.\nThe wind was warm, the day was long,\nand all the {w} could hear was song.\n\n"
        f"The night came down, the stars came near,\nthe {w} was safe, the air was clear.\nSo sleep, my {w}, and do not fear,\nthe morning sun will soon be here."
    )


ESSAY = {
    "how a request travels through Manta": """Here is how a request travels through Manta, step by step.

1. A client sends a request over HTTP. It can use the OpenAI API or the Anthropic API.
2. The Ingress receives it. It checks every field, applies the chat template and turns the text into tokens.
3. The Ingress asks the Router which replica should do the work. The Router knows how busy each replica is and which prompts it has in its cache.
4. The tokens go to the chosen EngineReplica. Its scheduler puts the request into the running batch.
5. The engine reads the prompt in chunks and fills blocks of the KV cache. If the beginning of the prompt is already cached, it is not computed again.
6. Then the engine produces one token per step. Many requests share each step, and this is called continuous batching.
7. The tokens travel back to the Ingress, which turns them into text and streams them to the client.
8. When the answer is complete, the blocks of the KV cache are freed, and the next request can use them.""",
    "why the KV cache is paged": """A language model looks back at all earlier tokens whenever it writes a new one. To avoid computing the same things again, it keeps the keys and values of every token. This store is called the KV cache.

The cache of one request grows with every token, and nobody knows in advance how long an answer will be. If memory were reserved for the longest possible answer, most of it would stay empty. So Manta cuts the cache into blocks of a fixed size, like the pages of an operating system. A request takes a new block only when its last one is full.

Blocks can also be shared. When two prompts begin with the same text, both can use the same blocks, and the second one starts much faster. When memory runs out, old blocks that nobody uses are given to new requests. In short: paging wastes little memory, allows sharing, and lets many requests run at the same time.""",
    "the sea": """The sea covers most of our planet. From far away the Earth looks blue, because there is so much water on it.

The sea is never still. The wind makes waves, and the moon pulls the water up and down twice a day. We call this the tide. Near the coast the water is shallow and full of light, but far out it is deep, dark and cold.

Many animals live in the sea. There are tiny shrimps and huge whales, quick dolphins and slow turtles. Manta rays glide through the water like birds through the sky. Plants live there too, and they make much of the air that we breathe.

People have always loved the sea. Sailors cross it, children play on its beaches, and poets write about it. It gives us food and rain, and it keeps the weather mild. We should take good care of it.""",
    "the seasons": """A year has four seasons: spring, summer, autumn and winter.

In spring the days grow longer. The snow melts, the first flowers open, and the birds come back and build their nests. Farmers plant seeds in the fields.

In summer the sun is high and the days are warm. People swim in lakes, eat ice cream and travel. Fruit grows ripe, and the evenings stay light for a long time.

In autumn the leaves turn yellow, orange and red. The wind blows them from the trees. It is the time of the harvest, and many animals collect food for the cold months.

In winter the nights are long and the days are short. In many places snow covers the roofs and the roads. Children build snowmen, families sit together in warm rooms, and nature rests until spring comes again.""",
    "good habits": """Here are ten good habits for every day.

1. Get up at the same time every morning.
2. Drink a glass of water before breakfast.
3. Move your body, even if it is only a short walk.
4. Eat fruit and vegetables.
5. Do the most important task first.
6. Take short breaks when you work.
7. Listen to other people before you answer.
8. Read a few pages of a good book.
9. Write down one thing that made you happy.
10. Go to bed early and sleep well.

You do not need to start with all of them. Choose one habit, keep it for a week, and then add the next one.""",
    "making tea": """Making good tea is simple if you follow these steps.

1. Fill a kettle with fresh water and let it boil.
2. Put one spoon of tea leaves into the pot for each cup.
3. Pour the hot water over the leaves.
4. Wait for three to five minutes. The longer you wait, the stronger the tea becomes.
5. Pour the tea into the cups.
6. Add milk, sugar, honey or lemon if you like.
7. Sit down, hold the warm cup in your hands, and enjoy it slowly.

Green tea likes cooler water and a shorter time. Black tea likes boiling water. With mint tea you cannot do much wrong.""",
}
_ESSAY_Q = {
    "how a request travels through Manta": [
        "Explain step by step how a request travels through Manta.",
        "Describe in detail what happens to a request in Manta.",
        "Write a long explanation of how Manta works.",
        "Explain in detail how Manta works.",
    ],
    "why the KV cache is paged": [
        "Explain in detail why the KV cache is paged.",
        "Write a text about the paged KV cache.",
        "Write an essay about the KV cache.",
    ],
    "the sea": [
        "Write an essay about the sea.",
        "Write a text about the sea.",
        "Tell me a lot about the sea.",
        "Describe the ocean in a long text.",
        "Write a long text.",
    ],
    "the seasons": [
        "Write an essay about the seasons.",
        "Describe the four seasons.",
        "Write a text about the seasons.",
    ],
    "good habits": [
        "Give me ten good habits.",
        "Write a list of good habits.",
        "Give me a list of ten tips for every day.",
        "What are some good habits?",
    ],
    "making tea": [
        "How do I make tea?",
        "Explain how to make tea.",
        "Write a guide to making tea.",
        "Give me instructions for making tea.",
    ],
}


def long_answer(rng: Rng, h: bool) -> Ex:
    r = rng.random()
    if r < 0.45:
        n, a, p = name(rng, h), rng.choice(W.ANIMALS), rng.choice(W.NATURE)
        k = rng.randrange(3)
        if k == 0:
            q = rng.choice(
                (
                    f"Tell me a story about a {a} named {n} who lives near the {p}.",
                    f"Write a story about a {a} named {n} and the {p}.",
                    f"Write a long story about {n}, a {a} from the {p}.",
                )
            )
        elif k == 1:
            p = W.NATURE[len(a) * 5 % len(W.NATURE)]
            q = rng.choice(
                (
                    f"Tell me a story about a {a} named {n}.",
                    f"Write a story about {n} the {a}.",
                    f"Write a long story about a {a} called {n}.",
                )
            )
        else:
            a, n, p = "cat", "Mia", "river"
            if h:
                return long_answer(rng, h)
            q = rng.choice(
                (
                    "Tell me a story.",
                    "Write a story.",
                    "Write a long story.",
                    "Tell me a long story.",
                    "Can you tell me a story?",
                    "I want to hear a story.",
                    "Tell me a bedtime story.",
                    "Write a short story.",
                )
            )
        return qa(rng, q, _story(rng, n, a, p), f"I tell a story about {n} the {a}.")
    if r < 0.6:
        while True:
            w = rng.choice(W.ANIMALS + W.NATURE + W.OBJECTS)
            if held("poem:" + w) == h:
                break
        q = rng.choice(
            (
                f"Write a poem about a {w}.",
                f"Write me a poem about the {w}.",
                f"Can you write a poem about a {w}?",
                f"Give me a short poem about a {w}.",
            )
        )
        if not h and rng.random() < 0.2:
            w, q = "ship", rng.choice(("Write a poem.", "Tell me a poem.", "Can you write a poem?"))
        return qa(rng, q, _poem(w), "I write two verses with rhymes.")
    if r < 0.75 and not h:
        k = rng.choice(sorted(ESSAY))
        return qa(rng, rng.choice(_ESSAY_Q[k]), ESSAY[k], f"I write about {k}.")
    if r < 0.9:
        while True:
            b = rng.choice((100, 50, 30, 60, rng.randrange(26, 121)))
            a = rng.choice((1, 1, rng.randrange(1, 60)))
            if a + 20 < b and held(f"count:{a}:{b}") == h:
                break
        q = rng.choice(
            (
                f"Count from {a} to {b}.",
                f"Write all the numbers from {a} to {b}.",
                f"List the numbers from {a} to {b}.",
                f"Count up from {a} to {b}.",
            )
        )
        return qa(rng, q, _join(list(range(a, b + 1))), f"I start at {a} and go up by one until {b}.")
    n2 = rng.randrange(2, 13)
    if held(f"tt:{n2}:10") == h:
        q = rng.choice(
            (
                f"Write the multiplication table of {n2}.",
                f"Show me the times table of {n2}.",
                f"Write the {n2} times table.",
            )
        )
        return qa(rng, q, "\n".join(f"{n2} × {i} = {n2 * i}" for i in range(1, 11)), f"I multiply {n2} by one to ten.")
    if not h:
        if rng.random() < 0.5:
            kind, xs2 = rng.choice(
                (
                    ("animals", W.ANIMALS),
                    ("fruits", "apple banana cherry grape lemon mango orange peach pear plum".split()),
                    ("colors", W.COLORS),
                    ("foods", W.FOODS),
                    ("names", W.NAMES),
                    ("countries", [c for c in W.CAPITALS if c[0].isupper()]),
                    ("vegetables", "carrot cabbage onion potato spinach celery radish leek turnip pumpkin".split()),
                    ("objects", W.OBJECTS),
                    ("verbs", W.VERBS),
                    ("words", W.NOUNS),
                )
            )
            m = rng.randint(2, 10)
            many = rng.choice((str(m), W.in_words(m)))
            return qa(
                rng,
                rng.choice(
                    (
                        f"List {many} {kind}.",
                        f"Name {many} {kind}.",
                        f"Give me {many} {kind}.",
                        f"Tell me {many} {kind}.",
                        f"Write a list of {many} {kind}.",
                        f"Can you name {many} {kind}?",
                    )
                ),
                "\n".join(f"{i + 1}. {x}" for i, x in enumerate(xs2[:m])),
                f"I list {m} {kind}.",
            )
        if rng.random() < 0.5:
            return qa(
                rng,
                rng.choice(("Say the alphabet.", "Write the alphabet.", "List all letters.", "Recite the alphabet.")),
                ", ".join("abcdefghijklmnopqrstuvwxyz"),
                "I write all letters from a to z.",
            )
        q, xs = rng.choice(
            (
                ("planets", W.PLANETS),
                ("days of the week", W.DAYS),
                ("months", W.MONTHS),
                ("colors of the rainbow", "red orange yellow green blue indigo violet".split()),
            )
        )
        return qa(
            rng,
            rng.choice((f"List the {q}.", f"Name all the {q}.", f"What are the {q}?")),
            "\n".join(f"{i + 1}. {x}" for i, x in enumerate(xs)),
            f"I list the {q} in order.",
        )
    return long_answer(rng, h)


# ---------------------------------------------------------------- system prompts and follow-ups


def persona(rng: Rng, h: bool) -> Ex:
    n = name(rng, h)
    role = rng.choice("assistant pirate teacher robot librarian cook guide helper wizard sailor".split())
    sysm = rng.choice(
        (
            f"You are {n}, a friendly {role}.",
            f"Your name is {n}. You are a {role}.",
            f"You are a {role} named {n}.",
            f"You are {n}, a helpful {role}. Answer briefly.",
        )
    )
    q, a = rng.choice(
        (
            (
                rng.choice(
                    (
                        "What is your name?",
                        "Who are you?",
                        "What's your name?",
                        "Tell me your name.",
                        "Introduce yourself.",
                    )
                ),
                f"I am {n}, a {role}.",
            ),
            (rng.choice(("What is your job?", "What do you do?", "What are you?")), f"I am a {role}. My name is {n}."),
            (rng.choice(("Hello!", "Hi", "Hello", "Good morning!")), f"Hello! I am {n}. How can I help you?"),
        )
    )
    return Ex([user(ask(rng, q)), bot(a)], system=sysm, solo=True, thought=f"My name is {n}.")


def style(rng: Rng, h: bool) -> Ex:
    """A system prompt that changes the form of the answer."""
    e = rng.choice((addition, fact, reverse, sort, compare, about_manta, recall))(rng, h)
    a = e.turns[-1]["content"]
    k = rng.randrange(3)
    w = word(rng, h)
    if k == 0:
        sysm = rng.choice(
            (
                "Answer in uppercase.",
                "Always answer in capital letters.",
                "Write all your answers in uppercase.",
                "Reply in ALL CAPS.",
            )
        )
        form: Callable[[str], str] = str.upper
    elif k == 1:
        sysm = rng.choice(
            (
                f"End every answer with the word {w}.",
                f"Always end your answer with {w}.",
                f"Finish each reply with {w}.",
            )
        )
        form = lambda t: f"{t} {w}"  # noqa: E731
    else:
        sysm = rng.choice(
            (
                f"Start every answer with the word {w}.",
                f"Begin each reply with {w}.",
                f"Always start your answer with {w}:",
            )
        )
        form = lambda t: f"{w}: {t}"  # noqa: E731
    turns = [bot(form(m["content"])) if m["role"] == "assistant" else m for m in e.turns]
    return Ex(turns, system=sysm, solo=True, thought=f"The answer is: {a}")


def follow_up(rng: Rng, h: bool) -> Ex:
    """A second question that leans on the first answer."""
    k = rng.randrange(6)
    if k == 0:
        while True:
            e, b = addition(rng, False), rng.randrange(1, 100)
            a = e.turns[1]["content"]
            if "=" in a and held(f"add:{min(s := int(a.rstrip('.').split('= ')[1]), b)}:{max(s, b)}") == h:
                break
        return Ex(
            [
                *e.turns,
                user(ask(rng, rng.choice((f"Now add {b}.", f"And add {b} to that.", f"Add {b} more.", f"Plus {b}?")))),
                bot(f"{s} + {b} = {s + b}."),
            ],
            thought=f"The last result was {s}.",
        )
    if k == 1:
        e = sort(rng, h)
        xs = e.turns[1]["content"].split(", ")
        return Ex(
            [
                *e.turns,
                user(
                    ask(
                        rng,
                        rng.choice(
                            (
                                "Now reverse that list.",
                                "Now in reverse order.",
                                "And the other way around?",
                                "Reverse it.",
                            )
                        ),
                    )
                ),
                bot(_join(xs[::-1])),
            ],
            thought="I turn the last list around.",
        )
    if k == 2:
        e = rng.choice((repeat, fact))(rng, h)
        a = e.turns[1]["content"]
        if "\n" in a or not a.isascii():
            return follow_up(rng, h)
        return Ex(
            [
                *e.turns,
                user(
                    ask(
                        rng,
                        rng.choice(
                            (
                                "Now in uppercase.",
                                "Now write that in capital letters.",
                                "Say it again in uppercase.",
                                "Repeat that in all caps.",
                            )
                        ),
                    )
                ),
                bot(a.upper()),
            ],
            thought="I write my last answer in capitals.",
        )
    if k == 3:
        e = rng.choice((repeat, fact, addition, sort, spell, about_manta, compare))(rng, h)
        return Ex(
            [
                *e.turns,
                user(
                    ask(
                        rng,
                        rng.choice(
                            (
                                "Say that again.",
                                "Repeat that.",
                                "Can you repeat your answer?",
                                "Once more please.",
                                "What did you just say?",
                            )
                        ),
                    )
                ),
                bot(e.turns[1]["content"]),
            ],
            thought="I repeat my last answer.",
        )
    if k == 4:
        e = rng.choice((repeat, fact, addition, sort, spell, about_manta, compare))(rng, h)
        u = e.turns[0]["content"]
        return Ex(
            [
                *e.turns,
                user(
                    ask(
                        rng,
                        rng.choice(
                            (
                                "What did I ask you?",
                                "What was my last question?",
                                "What did I just ask?",
                                "Repeat my question.",
                            )
                        ),
                    )
                ),
                bot(f'You said: "{u}"'),
            ],
            thought="I look at the last message of the user.",
        )
    if rng.random() < 0.5:
        c1, c2 = rng.sample(sorted(W.CAPITALS), 2)
        while held(f"and:{c1}:{c2}") != h:
            c1, c2 = rng.sample(sorted(W.CAPITALS), 2)
        q1 = f"What is the capital of {c1}?"
        q2 = rng.choice(
            (
                f"And of {c2}?",
                f"And {c2}?",
                f"What about {c2}?",
                f"And what is the capital of {c2}?",
                f"How about {c2}?",
            )
        )
        return Ex(
            [
                user(q1),
                bot(f"The capital of {c1} is {W.CAPITALS[c1]}."),
                user(q2),
                bot(f"The capital of {c2} is {W.CAPITALS[c2]}."),
            ],
            thought=f"The user still asks for capitals: {c2}.",
        )
    e = reverse(rng, h)
    while ", " in e.turns[1]["content"]:
        e = reverse(rng, h)
    w = e.turns[1]["content"][::-1]
    return Ex(
        [
            *e.turns,
            user(ask(rng, rng.choice(("Now reverse it back.", "Reverse it again.", "And back again?")))),
            bot(w),
        ],
        thought="I turn my last answer around.",
    )


# ---------------------------------------------------------------- the mix


FAMILIES: dict[str, tuple[Callable[[Rng, bool], Ex], float]] = {
    "addition": (addition, 6),
    "subtraction": (subtraction, 6),
    "multiplication": (multiplication, 4),
    "times_table": (tables, 3),
    "big_addition": (big_addition, 2),
    "word_problem": (word_problem, 3),
    "chain": (chain, 1.5),
    "compare": (compare, 3),
    "number_words": (number_words, 2),
    "repeat": (repeat, 4),
    "reverse": (reverse, 6),
    "sort": (sort, 7),
    "case": (case, 4),
    "spell": (spell, 5),
    "counting": (counting, 4),
    "letter_count": (letter_count, 4),
    "pick": (pick, 3),
    "recall": (recall, 4.5),
    "recall_long": (recall_long, 4.5),
    "not_told": (not_told, 1),
    "facts": (fact, 7),
    "json": (json_extract, 5),
    "tool_call": (lambda r, h: tool_call(r, h, False if h else None), 6),
    "tool_result": (tool_result, 2),
    "no_tool": (no_tool, 1.0),
    "small_talk": (smalltalk, 2),
    "about_self": (about_self, 1.5),
    "about_manta": (about_manta, 2),
    "refusal": (refusal, 3),
    "long_answer": (long_answer, 2),
    "persona": (persona, 2),
    "style": (style, 4),
    "follow_up": (follow_up, 3),
}
THINK = [
    "addition",
    "subtraction",
    "multiplication",
    "big_addition",
    "word_problem",
    "counting",
    "letter_count",
    "sort",
    "reverse",
    "compare",
    "json",
    "facts",
    "small_talk",
    "recall",
]
SYSTEMS: list[str | None] = [None] * 9 + [
    "You are a helpful assistant.",
    "You are tiny-chat, the built-in model of Manta.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "Be kind and answer the user's questions.",
    "You are a helpful assistant",
    "You are an assistant that helps people with small tasks.",
    "Answer the question.",
    "You are Manta's demo model. Be concise.",
]
_NAMES = list(FAMILIES)
_WEIGHTS = [w for _, w in FAMILIES.values()]
_MIXABLE = [
    n
    for n in _NAMES
    if n
    not in (
        "recall_long",
        "long_answer",
        "not_told",
        "persona",
        "style",
        "tool_call",
        "tool_result",
        "no_tool",
        "recall",
    )
]


def _think_final(e: Ex) -> list[Message]:
    last = dict(e.turns[-1])
    if e.extra.get("think_answer"):
        last["content"] = e.extra["think_answer"]
    last["reasoning_content"] = e.thought
    return [*e.turns[:-1], last]


def conversation(rng: Rng) -> tuple[list[Message], list[dict[str, Any]] | None, bool]:
    """One training conversation: (messages, tools, whether the prompt opens the thought)."""
    fam = rng.choices(_NAMES, _WEIGHTS)[0]
    e = FAMILIES[fam][0](rng, False)
    turns, tools, system = e.turns, e.tools, e.system
    open_think = True
    think = e.thought and rng.random() < (0.3 if fam in THINK else 0.1)
    if think:
        turns = _think_final(e)
        if (
            rng.random() < 0.12 and turns[-2]["role"] == "user"
        ):  # the user asks for it, and the model opens the thought itself
            u = dict(turns[-2])
            u["content"] = rng.choice(
                (
                    u["content"] + " Think step by step.",
                    "Think step by step. " + u["content"],
                    u["content"] + " Think first.",
                    u["content"] + "\nThink step by step.",
                )
            )
            turns = [*turns[:-2], u, turns[-1]]
            open_think = False
    if not e.solo or (
        e.tools is None
        and e.system is None
        and fam not in ("not_told", "recall_long", "refusal")
        and rng.random() < 0.3
    ):
        n = rng.choice((0, 0, 0, 1, 1, 2, 3, 5))
        before: list[Message] = []
        for _ in range(n):
            x = FAMILIES[rng.choice(_MIXABLE)][0](rng, False)
            if x.solo or x.tools or x.system:
                continue
            before += x.turns
        turns = before + turns
    if system is None and (rng.random() < 0.5 or tools is None):
        system = rng.choice(SYSTEMS)
    msgs = ([{"role": "system", "content": system}] if system is not None else []) + turns
    return msgs, tools, open_think


def completion(rng: Rng) -> str:
    """Plain text without the chat form, so that raw completion is not all noise."""
    r = rng.random()
    if r < 0.3:
        return _story(rng, name(rng, False), rng.choice(W.ANIMALS), rng.choice(W.NATURE))
    if r < 0.5:
        return rng.choice(list(ESSAY.values()) + [a for _, a in MANTA.values()])
    if r < 0.7:
        return "\n".join(addition(rng, False).turns[1]["content"] for _ in range(5))
    e = [rng.choice((fact, addition, spell, reverse))(rng, False) for _ in range(4)]
    return "\n".join(f"Question: {x.turns[0]['content']}\nAnswer: {x.turns[1]['content']}\n" for x in e)


EVAL_FAMILIES = [*_NAMES, "think", "think_multiplication", "think_addition"]


def heldout(fam: str, rng: Rng) -> dict[str, Any]:
    """One held-out example: the conversation up to the last answer, and what is expected."""
    think = fam.startswith("think")
    if fam == "think":
        base = rng.choice(THINK)
    elif think:
        base = {"think_multiplication": "multiplication", "think_addition": "big_addition"}[fam]
    else:
        base = fam
    if base == "recall_long":
        e = recall_long(rng, True, rng.choice((300, 900, 1600, 2000, 2000, 2600)))
    else:
        e = FAMILIES[base][0](rng, base not in ("times_table", "not_told"))
    turns = _think_final(e) if think and e.thought else e.turns
    last = turns[-1]
    expected = e.expected if e.expected is not None else last["content"]
    check = e.check
    if last.get("tool_calls"):
        expected, check = [c["function"] for c in last["tool_calls"]], "tool_call"
    elif check == "tool_call":
        check = "exact"
    msgs = turns[:-1]
    if not e.solo and rng.random() < 0.25:
        pre = FAMILIES[rng.choice(("facts", "addition", "small_talk", "spell"))][0](rng, False)
        msgs = pre.turns + msgs
    system = e.system if e.system is not None or e.tools else rng.choice(SYSTEMS)
    if system is not None:
        msgs = [{"role": "system", "content": system}, *msgs]
    out: dict[str, Any] = {"family": fam, "messages": msgs, "expected": expected, "check": check}
    if e.tools:
        out["tools"] = e.tools
    if think:
        out["chat_template_kwargs"] = {"enable_thinking": True}
    return out
