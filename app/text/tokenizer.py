"""A model's tokenizer, read from tokenizer.json (its own, or one made of another form) by the `tokenizers` library.

Equal to transformers' AutoTokenizer on the same directory: ids, special tokens, beginning-of-sequence handling (the
post-processor of tokenizer.json), decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import decoders

from app.checkpoints.fields.tokenizer_config import (
    SPECIAL_TOKENS,
    check_tokenizer_config,
    check_vocabulary,
)
from app.checkpoints.json_file import read_object
from app.errors import CheckpointError, InvalidRequestError
from app.text.byte_table import byte_level_table
from app.text.tokenizer_files import tokenizer_json

# Above so many characters or token ids, the library's batch calls are used even for one text: they let other threads
# run meanwhile (the single calls hold the interpreter lock), but cost 0.2 ms each.
LONG = 2048
_SHRINKING = 4  # normalizers compose up to so many characters into one


class Tokenizer:
    """Token ids of a text and the text of token ids. Immutable once built, so threads may share it."""

    def __init__(
        self, backend: Any, special_tokens: dict[str, str], config: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        # A length limit or padding saved by the training script must not touch prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.config = config  # tokenizer_config.json, as it was read
        self.special_tokens = special_tokens  # by name, such as {"eos_token": "<|im_end|>"}: chat templates see them
        self.special_token_ids: frozenset[int] = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Read `tokenizer.json` and `tokenizer_config.json`; CheckpointError names a missing or broken file."""
        path = Path(directory)
        file = tokenizer_json(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"cannot read {file}: {error}", param="tokenizer") from error
        config = {**read_tokenizer_config(file.parent), **read_tokenizer_config(path)}
        check_tokenizer_config(config, f"{path}/tokenizer_config.json")
        special = _named_special_tokens(config)
        _add_missing_tokens(backend, config, special)
        tokenizer = cls(backend, {name: token["content"] for name, token in special.items()}, config)
        check_vocabulary(tokenizer._vocab, str(file))
        return tokenizer

    def to_json(self) -> str:
        """The whole tokenizer as the text of a tokenizer.json, with the tokens that other files added."""
        text: str = self._backend.to_str()
        return text

    @property
    def vocab_size(self) -> int:
        """Tokens known, added ones included. The model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, if the model has one."""
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model's post-processor adds (mostly a bos)."""
        if len(text) > LONG:
            return self.encode_batch([text], add_special_tokens)[0]
        with _refusals():
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, in one call."""
        if sum(map(len, texts)) <= LONG:
            return [self.encode(text, add_special_tokens) for text in texts]
        with _refusals():
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_plain(self, texts: Sequence[str]) -> list[Any]:
        """The library's encoding of each text without special tokens, for `join`."""
        with _refusals():
            plain: list[Any] = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return plain

    def join(self, first: Any, second: Any | None = None) -> Any:
        """Plain encodings of a text or a pair with the special tokens that belong around them."""
        return self._backend.post_process(first, second, True)

    def num_special_tokens(self, is_pair: bool) -> int:
        """Special tokens that `join` adds."""
        return int(self._backend.num_special_tokens_to_add(is_pair))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; unknown ids have no text, bytes that are not UTF-8 become U+FFFD."""
        ids = list(token_ids)
        if len(ids) > LONG:
            texts: list[str] = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            return texts[0]
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        """Id of the token written `token` in the vocabulary."""
        index: int | None = self._backend.token_to_id(token)
        return index

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it (`Ġthe`, `▁the`); None for an id out of range."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    @cached_property
    def is_byte_level(self) -> bool:
        """True if text is the plain concatenation of the tokens' bytes (GPT-2 style byte-level BPE)."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    @cached_property
    def byte_table(self) -> list[bytes]:
        """id -> bytes of the token alone; empty for ids without a token. For any kind of tokenizer."""
        return byte_level_table(self._vocab) if self.is_byte_level else self._decoded_table()

    @cached_property
    def max_chars_per_token(self) -> int:
        """Characters of a text that one token can stand for, at most: the longest token's, and more where the
        tokenizer drops or joins characters before it looks them up."""
        longest = max(max(map(len, self.byte_table), default=1), 1)
        is_lossless = self.is_byte_level and self._backend.normalizer is None
        return longest if is_lossless else _SHRINKING * longest

    @cached_property
    def text_table(self) -> list[str | None]:
        """id -> text of a token whose bytes are complete UTF-8 by themselves, else None."""
        return [_text_or_none(token) for token in self.byte_table]

    @cached_property
    def byte_fallback_ids(self) -> frozenset[int]:
        """Ids of the tokens written `<0x0A>`, which stand for one byte each in SentencePiece vocabularies."""
        if self.is_byte_level:
            return frozenset()
        found = (self._vocab.get(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(index for index in found if index is not None)

    @cached_property
    def _vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocab

    def _decoded_table(self) -> list[bytes]:
        """Bytes of the tokens of other tokenizers: `▁` is a space, `<0x0A>` a byte."""
        table = [b""] * (max(self._vocab.values()) + 1)
        added = self._backend.get_added_tokens_decoder()
        for token, index in self._vocab.items():
            if index in added:
                table[index] = token.encode()
            elif index in self.byte_fallback_ids:
                table[index] = bytes([int(token[3:5], 16)])
            else:
                table[index] = token.replace("▁", " ").encode()
        return table

    def token_text(self, token_id: int) -> str:
        """Text of one token for logprobs: with its leading space, U+FFFD for a part of a character."""
        return self.shown_table[token_id] if 0 <= token_id < len(self.shown_table) else ""

    @cached_property
    def shown_table(self) -> list[str]:
        """`token_text` of every token, by id."""
        return [token.decode("utf-8", "replace") for token in self.byte_table]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for an id out of range."""
        return self.byte_table[token_id] if 0 <= token_id < len(self.byte_table) else b""


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """`tokenizer_config.json` of a model directory, {} when there is none; CheckpointError when it is broken."""
    return read_json(path / "tokenizer_config.json")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file, {} when there is none; CheckpointError when it is broken."""
    return read_object(file, optional=True, param="tokenizer")


def _named_special_tokens(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{"eos_token": {"content": ...}, ...}; the files hold either the text or a description of the token."""
    named = {name: config.get(name) for name in SPECIAL_TOKENS}
    return {
        name: token if isinstance(token, dict) else {"content": token}
        for name, token in named.items()
        if token is not None
    }


def _add_missing_tokens(backend: Any, config: dict[str, Any], special: dict[str, dict[str, Any]]) -> None:
    """Add tokens that only tokenizer_config.json knows, as AutoTokenizer does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    described = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    wanted = [
        *(token for _, token in described),
        *({"special": True, **token} for token in special.values()),
        *({"special": True, **(token if isinstance(token, dict) else {"content": token})} for token in _values(extra)),
    ]
    for token in wanted:
        if token["content"] not in known:
            known.add(token["content"])
            options = {name: bool(token[name]) for name in _TOKEN_OPTIONS if name in token}
            backend.add_tokens([tokenizers.AddedToken(token["content"], **options)])


_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _values(extra: Any) -> list[Any]:
    return list(extra.values()) if isinstance(extra, dict) else list(extra)


def _text_or_none(token: bytes) -> str | None:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return None


@contextmanager
def _refusals() -> Iterator[None]:
    """InvalidRequestError for half of a UTF-16 surrogate pair, for which the library raises a bare TypeError, and for a
    text that a pattern of tokenizer.json does not split within Oniguruma's 10 million tries, at which it panics."""
    try:
        yield
    except TypeError as error:
        what = "the text holds an unpaired surrogate, which is no Unicode text"
        raise InvalidRequestError(f"prompt: {what}", param="prompt") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of no module that could be imported
            raise
        what = "the model's tokenizer cannot split this text"
        raise InvalidRequestError(f"prompt: {what} ({error!s:.80})", param="prompt") from error
