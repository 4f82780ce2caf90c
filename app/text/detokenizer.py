"""Incremental detokenisation: the text each new token adds.

The deltas (and the final `flush`) concatenate to `Tokenizer.decode` of the whole, and no delta ends in half a
character: bytes wait until their character is complete or known to be broken. One thing differs: where `decode` writes
U+FFFD for each byte of a run of byte tokens because one of them is broken, only the broken ones become U+FFFD here, as
the characters before them have been sent.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from app.text.tokenizer import Tokenizer

# Prompt tokens that a window detokenizer sees before the first output token, so that a leading space survives.
PROMPT_CONTEXT = 5
MAX_HELD = 16  # tokens that a window holds back; a character that is not complete takes four


class Detokenizer(Protocol):
    """Text of one output, token by token."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often all of it, sometimes none."""
        ...

    def flush(self) -> str:
        """Text still held at the end: U+FFFD for the bytes of an unfinished character."""
        ...


def create_detokenizer(
    tokenizer: Tokenizer,
    skip_special_tokens: bool = True,
    prompt_token_ids: Sequence[int] = (),
    shown: frozenset[int] = frozenset(),
) -> Detokenizer:
    """The right detokenizer for a tokenizer. `prompt_token_ids` gives it the context that the output continues.

    `shown` are special tokens that have their text although the others are skipped.
    """
    skipped = tokenizer.special_token_ids - shown if skip_special_tokens else frozenset[int]()
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, skipped)
    return WindowDetokenizer(tokenizer, skipped, prompt_token_ids)


class ByteLevelDetokenizer:
    """Byte-level BPE: a table look-up per token, and a UTF-8 decoder for tokens that cut characters."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._texts = tokenizer.text_table
        self._bytes = tokenizer.byte_table
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        if token_id in self._skipped or not 0 <= token_id < len(self._texts):
            return ""
        text = None if self._pending else self._texts[token_id]
        if text is not None:
            return text
        text = self._decoder.decode(self._bytes[token_id])
        self._pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """U+FFFD for the bytes of an unfinished character."""
        self._pending = False
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Every other tokenizer: decode a short window with and without the new tokens, and emit the difference (the prefix
    and read offsets of text-generation-inference and vLLM).

    The window starts with the tokens emitted last, because decoders strip or join at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._known = len(tokenizer.byte_table)
        self._window = [token for token in prompt_token_ids[-4 * PROMPT_CONTEXT :] if token not in self._skipped]
        self._window = self._window[-PROMPT_CONTEXT:]
        self._num_emitted = len(self._window)
        self._prefix = self._decode(self._window)
        self._bytes: list[int] = []  # byte tokens of a character that is not complete
        self._broken: list[int] = []  # the last byte token that became U+FFFD

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        if token_id in self._skipped or not 0 <= token_id < self._known:
            return ""
        if self._is_byte(token_id):
            self._bytes.append(token_id)
            return self._push_bytes()
        broken = self._break_off(len(self._bytes))
        if not self._window and self._broken:  # else a decoder would take the token for the beginning of the text
            self._begin_behind(self._broken[0])
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith("\ufffd") and (delta := self._advance(text)):
            return broken + delta
        return broken if len(self._window) - self._num_emitted < MAX_HELD else broken + self._advance_part(text)

    def flush(self) -> str:
        """Text that the window still holds."""
        return self._break_off(len(self._bytes)) + self._held()

    def _held(self) -> str:
        return self._advance(self._decode(self._window)) if len(self._window) > self._num_emitted else ""

    def _push_bytes(self) -> str:
        """Text of the byte tokens that wait, as far as they are whole characters or known to be broken."""
        broken = ""
        while self._bytes:
            try:
                b"".join(map(self._tokenizer.token_bytes, self._bytes)).decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    return broken
                broken += self._break_off(error.end)
            else:
                if not self._window and self._broken:  # as in push, but a broken byte would break these too
                    self._begin_behind(self._word())
                self._window += self._bytes
                self._bytes = []
                return broken + self._advance(self._decode(self._window))
        return broken

    def _begin_behind(self, token_id: int) -> None:
        """Let the window begin with a token that has been emitted, or stands for one."""
        self._window, self._num_emitted = [token_id], 1
        self._prefix = self._decode(self._window)

    def _word(self) -> int:
        """Some token that is text, and no byte."""
        tokens = (token for token in range(self._known) if not self._is_byte(token))
        return next(token for token in tokens if self._decode([token]).isalnum())

    def _break_off(self, number: int) -> str:
        """U+FFFD for each of the first bytes that wait. They do not enter the window, where they would break others."""
        if not number:
            return ""
        self._broken, self._bytes = self._bytes[number - 1 : number], self._bytes[number:]
        return self._held() + "\ufffd" * number

    def _advance(self, text: str) -> str:
        delta = text[len(self._prefix) :]
        if delta:  # tokens without text stay in the window: what follows may depend on them
            self._window = self._window[self._num_emitted :]
            self._num_emitted = len(self._window)
            self._prefix = self._decode(self._window)
        return delta

    def _advance_part(self, text: str) -> str:
        """Emit all but the last tokens, which may belong to a character that is not complete: they would be decoded
        again with each token that comes, where the model says nothing but broken characters or tokens without text."""
        for num_kept in range(4, -1, -1):
            head = self._decode(self._window[: len(self._window) - num_kept])
            if text.startswith(head):
                break
        delta = head[len(self._prefix) :]
        self._window = self._window[self._num_emitted :]
        self._num_emitted = len(self._window) - num_kept
        self._prefix = self._decode(self._window[: self._num_emitted])
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        # Special tokens that are to be skipped never enter the window.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _is_byte(self, token_id: int) -> bool:
        return token_id in self._tokenizer.byte_fallback_ids
