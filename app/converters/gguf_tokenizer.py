"""The tokenizer that a GGUF file's metadata describe: as the form that llama.cpp's converter made it of.

`llama` is a SentencePiece model of byte pairs, `gpt2` byte-level byte pairs whose way to split a text has a name of
llama.cpp's (`tokenizer.ggml.pre`); the patterns behind the names are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import CheckpointError, UnsupportedError

Metadata = Mapping[str, Any]
_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6  # kinds of tokens, SentencePiece's own numbers

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST_WITH_SLASH}"
_GPT4O = rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# DeepSeek's: numbers and Chinese or Japanese texts first, then words, with what stands before them.
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPLITS = {
    "llama-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "glm4": (_LLAMA3,),
    "chatglm-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "gpt-4o": (_GPT4O,),
    "llama4": (_GPT4O,),
    "gpt-2": (_GPT2,),
    "phi-2": (_GPT2,),
    "olmo": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "deepseek-v3": _DEEPSEEK,
}
_NFC = ("qwen2", "deepseek-r1-qwen", "olmo")  # texts are normalized first


def kind_of(metadata: Metadata) -> str:
    """`llama` or `gpt2`; UnsupportedError names another."""
    kind = metadata.get(_KEY + "model")
    if kind not in ("llama", "gpt2"):
        raise UnsupportedError(
            f"GGUF: tokenizer.ggml.model {kind!r} is not supported (known: llama, gpt2); set --tokenizer to a "
            "directory",
            param="tokenizer",
        )
    return str(kind)


def adds_first_token(metadata: Metadata) -> bool:
    """True if a text begins with the bos token: as the file says, or as llama.cpp takes it to be."""
    default = kind_of(metadata) == "llama" or metadata.get(_KEY + "pre") == "llama-bpe"
    return bool(metadata.get(_KEY + "add_bos_token", default))


def sentencepiece_model(metadata: Metadata) -> bytes:
    """A SentencePiece model of byte pairs."""
    from transformers.convert_slow_tokenizer import import_protobuf

    tokens, scores, kinds = _tokens(metadata)
    model = import_protobuf().ModelProto()
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    trainer, rules = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size = 2, len(tokens)
    trainer.byte_fallback = _BYTE in kinds
    for name, key in (("unk_id", "unknown"), ("bos_id", "bos"), ("eos_id", "eos"), ("pad_id", "padding")):
        setattr(trainer, name, int(metadata.get(f"{_KEY}{key}_token_id", -1)))
    if trainer.unk_id < 0 and _UNKNOWN in kinds:
        trainer.unk_id = kinds.index(_UNKNOWN)
    trainer.unk_piece = tokens[trainer.unk_id]
    rules.name = "identity"
    rules.add_dummy_prefix = bool(metadata.get(_KEY + "add_space_prefix", True))
    rules.remove_extra_whitespaces = bool(metadata.get(_KEY + "remove_extra_whitespaces", False))
    rules.escape_whitespaces = True
    return bytes(model.SerializeToString())


def byte_level(metadata: Metadata) -> Any:
    """A `tokenizers.Tokenizer` of byte-level byte pairs, without what stands around a text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get(_KEY + "pre")
    if pre not in _SPLITS:
        known = ", ".join(sorted(_SPLITS))
        raise UnsupportedError(
            f"GGUF: tokenizer.ggml.pre {pre!r} is not known (known: {known}); set --tokenizer to a directory",
            param="tokenizer",
        )
    tokens, _, kinds = _tokens(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(_KEY + "merges", [])]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[str(pre)]]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, plain])
    backend.normalizer = normalizers.NFC() if pre in _NFC else None
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER):
            backend.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    return backend


def _tokens(metadata: Metadata) -> tuple[list[str], list[float], list[int]]:
    """All tokens, their scores and kinds; CheckpointError where these do not go together."""
    tokens = metadata.get(_KEY + "tokens") or []
    scores = metadata.get(_KEY + "scores") or [0.0] * len(tokens)
    kinds = metadata.get(_KEY + "token_type") or [1] * len(tokens)
    if not tokens or len(tokens) != len(scores) or len(tokens) != len(kinds):
        sizes = f"{len(tokens)} tokens, {len(scores)} scores, {len(kinds)} types"
        raise CheckpointError(f"GGUF: the tokenizer's metadata do not go together: {sizes}", param="tokenizer")
    return tokens, scores, kinds
