"""The tokenizer.json of a model directory: its own, or one made of the form that it holds its tokenizer in.

SentencePiece, tiktoken, Mistral's tekken and the files of transformers' older tokenizers are converted once, in a
process of their own (`manta convert-tokenizer`: the host half imports no transformers), and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

from app.checkpoints.user_cache import made_once
from app.errors import CheckpointError

OWN = "tokenizer.json"
# What else a tokenizer lies in, the first that is there.
SOURCES = (
    *("tekken.json", "tokenizer.model", "tiktoken.model", "*.tiktoken"),
    *("sentencepiece.bpe.model", "spiece.model", "vocab.json", "vocab.txt", "gguf_tokenizer.json"),
)
_READ_TOO = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "config.json")
_ROOT = Path(__file__).resolve().parent.parent.parent
_TIMEOUT_S = 600.0


def source_of(directory: Path) -> Path | None:
    """The file of a directory that a tokenizer.json can be made of."""
    return next((file for pattern in SOURCES for file in sorted(directory.glob(pattern)) if file.is_file()), None)


def check_tokenizer(directory: Path) -> None:
    """CheckpointError where a directory holds no tokenizer. Nothing is converted."""
    if not (directory / OWN).is_file() and source_of(directory) is None:
        raise CheckpointError(
            f"tokenizer: {directory} holds no {OWN}, nor what it could be made of ({', '.join(SOURCES)}); set "
            "--tokenizer to a directory that does",
            param="tokenizer",
        )


@cache
def tokenizer_json(directory: Path) -> Path:
    """The file; a conversion takes seconds. CheckpointError says why there is none."""
    check_tokenizer(directory)
    if (directory / OWN).is_file():
        return directory / OWN
    return made_once("tokenizers", _digest(directory), lambda output: _convert(directory, output)) / OWN


def _convert(directory: Path, output: Path) -> None:
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "app.cli", "convert-tokenizer", str(directory), str(output)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"the tokenizer of {directory} took longer than {_TIMEOUT_S:g} s to convert"
        raise CheckpointError(reason, param="tokenizer") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CheckpointError(reason.removeprefix("manta: error: "), param="tokenizer")


def _digest(directory: Path) -> str:
    """Digests what a conversion depends on."""
    digest = hashlib.sha256(f"1 {version('transformers')} {version('tokenizers')}".encode())
    source = source_of(directory)
    assert source is not None
    for file in (source, *(directory / name for name in _READ_TOO)):
        if file.is_file():
            digest.update(f"\n{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:32]
