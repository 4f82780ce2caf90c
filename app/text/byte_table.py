"""Bytes of byte-level BPE tokens: the vocabulary writes each byte as one printable character."""

from __future__ import annotations

from collections.abc import Mapping


def _char_of_byte() -> dict[int, str]:
    """byte -> the character that stands for it: itself when printable, else the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    return table | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def byte_level_table(vocab: Mapping[str, int]) -> list[bytes]:
    """id -> bytes. A token with a character outside the alphabet (an added token) stands for its own UTF-8."""
    chars = _char_of_byte()
    to_latin1: dict[int, str] = {ord(char): chr(byte) for byte, char in chars.items()}
    # Characters below 256 that stand for no byte must not slip through the latin-1 encoding below.
    outside = {code: "\uffff" for code in range(256) if code not in to_latin1}
    translation = to_latin1 | outside
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        try:
            table[index] = token.translate(translation).encode("latin-1")
        except UnicodeEncodeError:
            table[index] = token.encode()
    return table
