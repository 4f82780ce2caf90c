"""`manta convert-tokenizer`: a tokenizer.json, made of SentencePiece, tiktoken, tekken or older files by transformers.

Where the form has a library of its own, that library's tokens for some texts are what the result must give too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from app.cli.command import Command
from app.converters.gguf_tokenizer import adds_first_token, byte_level, kind_of, sentencepiece_model
from app.errors import CheckpointError, MantaError
from app.text.tokenizer import read_tokenizer_config
from app.text.tokenizer_files import OWN, SOURCES, check_tokenizer, source_of

PROBES = (
    *("Hello, world! It's 1234567 or 3.14.", "  two leading, trailing  ", "a\tb\n\nc\r\n", " ", "x = [1]; // {}"),
    *("naïve café, 東京, नमस्ते, 🙂👩‍👩‍👧", "ﬁ ① Ａ", "nul\x00 and \u00a0 space", "WORLDWIDE misunderstandings"),
)
# How tokenizers whose code lies beside them split a text, and their special tokens; their code is not run.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
)
_OF_CLASS: dict[str, tuple[str, tuple[str, ...]]] = {"QWenTokenizer": _QWEN}
CONFIG = "tokenizer_config.json"
Ids = Callable[[str], list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments: where from, where to."""
    forms = ", ".join(SOURCES)
    parser.add_argument("directory", metavar="DIRECTORY", type=Path, help=f"a directory that holds one of {forms}")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help=f"a directory, made for {OWN}")


def run(args: argparse.Namespace) -> int:
    """Convert and write."""
    if not args.directory.is_dir():
        raise CheckpointError(f"{args.directory} is no directory", param="directory")
    check_tokenizer(args.directory)
    if kept := [name for name in (OWN, CONFIG) if (args.output / name).exists()]:
        raise CheckpointError(f"{args.output} holds a {kept[0]} already: name another directory", param="output")
    convert(args.directory, args.output)
    print(f"use it with: --tokenizer {args.output}")
    return 0


def convert(directory: Path, output: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with its special tokens; CheckpointError where it cannot be."""
    source = source_of(directory)
    if source is None:
        raise CheckpointError(f"{directory} holds a {OWN} already", param="tokenizer")
    try:
        config = read_tokenizer_config(directory)
        backend, names = _converted(source, config)
    except MantaError:
        raise
    except ImportError as error:
        reason = f"{source} needs the package that reads it, of the extra `tokenizers`: {_line(error)}"
        raise CheckpointError(reason, param="tokenizer") from error
    except Exception as error:  # converters raise anything
        raise CheckpointError(f"cannot convert {source}: {_line(error)}", param="tokenizer") from error
    output.mkdir(parents=True, exist_ok=True)
    backend.save(str(output / OWN))
    (output / CONFIG).write_text(json.dumps({**names, **config}, indent=2) + "\n")


def _converted(source: Path, config: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """A `tokenizers.Tokenizer`, and its special tokens by name."""
    if source.name == "gguf_tokenizer.json":
        return _gguf(source, config)
    if source.name == "tekken.json":
        return _tekken(source)
    if source.suffix == ".tiktoken" or source.name == "tiktoken.model" or _is_tiktoken(source):
        return _tiktoken(source, config)
    return _sentencepiece(source, config) if source.name == "tokenizer.model" else _older(source.parent)


def _gguf(source: Path, config: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    metadata = json.loads(source.read_text(encoding="utf-8"))
    config = {"add_bos_token": adds_first_token(metadata), **config}
    if kind_of(metadata) == "gpt2":
        return _with_ends(byte_level(metadata), {}, config), {}
    with TemporaryDirectory() as scratch:
        model = Path(scratch) / "tokenizer.model"
        model.write_bytes(sentencepiece_model(metadata))
        return _sentencepiece(model, config)


def _is_tiktoken(source: Path) -> bool:
    """True if a file consists of lines such as `IQ== 0`."""
    with source.open("rb") as opened:
        first = opened.readline(4096).split()
    return source.suffix == ".model" and len(first) == 2 and first[1].isdigit()


def _sentencepiece(source: Path, config: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken, Regex, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import SentencePieceExtractor, SpmConverter

    proto = SentencePieceExtractor(str(source)).proto
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    kinds = {1: models.Unigram, 2: models.BPE}
    if trainer.model_type not in kinds:
        raise CheckpointError(f"{source}: only unigram and BPE models can be converted", param="tokenizer")
    parts = SentencePieceExtractor(str(source)).extract(kinds[trainer.model_type])
    backend = SpmConverter.build_tokenizer_from_spm_proto(proto, parts["vocab"], parts.get("merges"))
    steps: list[Any] = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend("▁")] if rules.add_dummy_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    for piece in proto.pieces:
        if piece.type == 3 or (piece.type == 4 and " " not in piece.piece):  # control tokens, and the user's
            spaced = "▁" in piece.piece and not rules.add_dummy_prefix  # looked for behind the normalizer
            backend.add_tokens([AddedToken(piece.piece, normalized=spaced, special=piece.type == 3)])
    judge = SentencePieceProcessor(model_proto=proto.SerializeToString())
    _must_equal(backend, judge.encode, source, "sentencepiece")
    pieces = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    names = {name: proto.pieces[index].piece for name, index in pieces.items() if index >= 0}
    return _with_ends(backend, names, config), names


def _tiktoken(source: Path, config: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    from tiktoken import Encoding
    from transformers.convert_slow_tokenizer import TikTokenConverter

    own = str(config.get("tokenizer_class"))
    if "auto_map" in config and own not in _OF_CLASS:
        raise CheckpointError(
            f"{source}: how {own} splits a text says its code only, which is not run; give --tokenizer a directory "
            f"with {OWN}",
            param="tokenizer",
        )
    ranks = TikTokenConverter.load_tiktoken_bpe(str(source))
    pattern, special = _OF_CLASS.get(own, (TikTokenConverter().pattern, ()))
    extras = list(special) or _by_id(config.get("added_tokens_decoder") or {}, len(ranks))
    backend = TikTokenConverter(str(source), pattern, extra_special_tokens=extras).converted()
    judge = Encoding("judge", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    _must_equal(backend, judge.encode_ordinary, source, "tiktoken")
    names = {"eos_token": special[0]} if special else {}
    return _with_ends(backend, names, {"add_bos_token": False, **config}), names


def _by_id(added: dict[str, Any], first: int) -> list[str]:
    """Added tokens from the id `first` on; ids between them are reserved."""
    tokens = {int(index): token["content"] for index, token in added.items()}
    return [tokens.get(index, f"<|reserved_token_{index}|>") for index in range(first, max(tokens, default=-1) + 1)]


def _tekken(source: Path) -> tuple[Any, dict[str, str]]:
    from base64 import b64decode

    from tiktoken import Encoding
    from transformers.integrations.mistral.tokenizer import MistralConverter

    backend = MistralConverter(str(source)).converted()
    content = json.loads(source.read_text(encoding="utf-8"))
    rules = content["config"]
    shift = int(rules["default_num_special_tokens"])
    ranks = {b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"]}
    kept = {piece: rank for piece, rank in ranks.items() if rank < rules["default_vocab_size"] - shift}
    judge = Encoding("judge", pat_str=rules["pattern"], mergeable_ranks=kept, special_tokens={})
    _must_equal(backend, lambda text: [shift + i for i in judge.encode_ordinary(text)], source, "tiktoken")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    names = {name: token for name, token in names.items() if backend.token_to_id(token) is not None}
    return _with_ends(backend, names, {}), names


def _older(directory: Path) -> tuple[Any, dict[str, str]]:
    """vocab.json and merges.txt, vocab.txt, SentencePiece with ids of its own: as the class in transformers does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return tokenizer.backend_tokenizer, names


def _with_ends(backend: Any, names: dict[str, str], config: dict[str, Any]) -> Any:
    """The same with what stands before and behind a text: a first token unless tokenizer_config.json says no."""
    from tokenizers import processors

    def token(name: str, adds: bool) -> str | None:
        given = config.get(name) or names.get(name)
        content = given["content"] if isinstance(given, dict) else given
        return content if adds and content and backend.token_to_id(content) is not None else None

    first = token("bos_token", bool(config.get("add_bos_token", True)))
    last = token("eos_token", bool(config.get("add_eos_token", False)))
    if first is None and last is None:
        return backend
    single, pair = (" ".join(filter(None, [first, *texts, last])) for texts in (["$A"], ["$A", first, "$B"]))
    ids = [(one, backend.token_to_id(one)) for one in dict.fromkeys(filter(None, [first, last]))]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    return backend


def _must_equal(backend: Any, judge: Ids, source: Path, library: str) -> None:
    """CheckpointError where the result gives other tokens than the form's own library."""
    for text in PROBES:
        if backend.encode(text, add_special_tokens=False).ids != judge(text):
            raise CheckpointError(
                f"{source} cannot be converted: {text!r} would become other tokens than {library} gives",
                param="tokenizer",
            )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


COMMAND = Command("make a tokenizer.json of a tokenizer in another form", add_arguments, run)
