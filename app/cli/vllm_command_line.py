"""Reads a command line of `vllm serve` as one of `manta serve`, by the table of `app.cli.vllm_flags`.

Our own options pass as they are. What means the same gets our name, what changes nothing here is dropped with a line
that says why, and the rest is a ConfigError that says what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from app.cli.vllm_flags import ACCEPTED, INSTEAD, RENAMED, SIZES, SWITCHES, TRANSLATED, Accepted
from app.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def translate(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and a line for each flag that changes nothing here. ConfigError names a flag that has no place."""
    ours: list[str] = []
    notes: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*ours, word, *words], notes
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        inline = [value] if equals else []
        if name == "--model":
            ours += inline or _next(name, words)
        elif name in RENAMED:
            ours += ["=".join([RENAMED[name], *inline])]
        elif name in SWITCHES:
            ours += SWITCHES[name]
        elif name in SIZES:
            ours += _size(name, (inline or _next(name, words))[0])
        elif name in TRANSLATED:
            translated = TRANSLATED[name]
            values = inline or (_all(name, words) if translated.many else _next(name, words))
            ours += translated.words(values)
        elif name in ACCEPTED:
            notes.append(_accept(name, ACCEPTED[name], inline, words))
        elif _instead(name) is not None:
            raise ConfigError(f"{name}: an option of vLLM; {_instead(name)}")
        else:
            ours.append(word)
    return ours, notes


def _accept(name: str, flag: Accepted, inline: list[str], words: list[str]) -> str:
    if flag.takes_value:
        value = (inline or _next(name, words))[0]
        if flag.values and value not in flag.values:
            raise ConfigError(
                f"{name} {value}: an option of vLLM; here {flag.why}, so only {flag.values[0]} can be met"
            )
    return f"{name} changes nothing: {flag.why}"


def _instead(name: str) -> str | None:
    """The advice for a flag, or for the one that `--no-` turns off."""
    if name in INSTEAD:
        return INSTEAD[name]
    positive = "--" + name.removeprefix("--no-")
    if not name.startswith("--no-") or positive not in INSTEAD.keys() | ACCEPTED.keys():
        return None
    return INSTEAD[positive] if positive in INSTEAD else f"it cannot be turned off: {ACCEPTED[positive].why}"


def _next(name: str, words: list[str]) -> list[str]:
    """The value of a flag, taken from what follows it. ConfigError: nothing follows."""
    if not words or (words[0].startswith("-") and not words[0].lstrip("-").isdigit()):
        raise ConfigError(f"{name}: expected a value")
    return [words.pop(0)]


def _all(name: str, words: list[str]) -> list[str]:
    values = _next(name, words)
    while words and not words[0].startswith("-"):
        values.append(words.pop(0))
    return values


def _size(name: str, text: str) -> list[str]:
    """A number as digits: k, m, g and t are powers of 1,000, capitals of 1,024. `auto` and -1 leave it to the model."""
    if text in ("auto", "-1"):
        return []
    match = _SIZE.fullmatch(text)
    if match is None:
        return [name, text]  # our own check names what is wrong
    number, unit = match.groups()
    amount = float(number) * (1024 if unit.isupper() else 1000) ** _POWERS[unit.lower()]
    if amount != int(amount) or (unit.isupper() and "." in number):
        raise ConfigError(f"{name}: {text!r} is no whole number of tokens or bytes")
    return [name, str(int(amount))]
