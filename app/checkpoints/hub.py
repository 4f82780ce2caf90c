"""Models of a hub, by `organisation/name` or a well-known `family:size`: what is needed of them is downloaded once and
kept by huggingface_hub.

Its settings are the environment's, as everywhere: HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT. A host process that
serves no weights downloads none. Code of a repository is neither downloaded nor run.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from app.checkpoints.known_models import known_repository
from app.checkpoints.weight_files import NAMED_FILES, format_of, weight_map
from app.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PASSWORD = re.compile(r"//[^/\s]+@")  # in the address of a proxy or a mirror
# All that is not weights: configuration, tokenizers, templates; of sentence-transformers' folders too.
# Small, and it is by their being there that a model is known to have them.
_HEADS = ("colbert_linear.pt", "sparse_linear.pt")
DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "artifact.metadata", *_HEADS)
NOT_OURS = ("onnx/*", "openvino/*", "original/*", "*.onnx", "*.py")  # other engines' forms, and code
DENSE = "[0-9]*_Dense"  # sentence-transformers' folders with weights of their own


def repository_of(model: str) -> str | None:
    """The repository that `model` may mean: `organisation/name`, or a well-known name's; None of a path that exists."""
    if Path(model).exists():
        return None
    return model if _ID.fullmatch(model) else known_repository(model)


@cache
def fetch_description(repository: str, revision: str | None, download_dir: str | None) -> Path:
    """The local directory of a repository, with all but its weights. Asked once in a process: it does not change.

    CheckpointError says why it is not to be had.
    """
    return _download(repository, revision, download_dir, DESCRIPTION)


def fetch_weights(
    repository: str, directory: Path, download_dir: str | None, load_format: str, beside: Sequence[str] = ()
) -> None:
    """Add the weights to the `directory` that `fetch_description` gave: safetensors, or else pytorch_model.bin, and the
    files that are named `beside` them.

    CheckpointError says why they are not to be had.
    """
    kinds = list(NAMED_FILES) if load_format == "auto" else [load_format] if load_format in NAMED_FILES else []
    for kind in kinds:
        single, index = NAMED_FILES[kind]
        is_indexed = (directory / index).is_file()
        names = sorted(set(weight_map(directory / index).values())) if is_indexed else [single]
        patterns = [*map(glob.escape, (*names, *beside)), f"{DENSE}/{single}"]
        _download(repository, directory.name, download_dir, patterns)
        if any((directory / name).is_file() for name in names):
            return
    if kinds:
        format_of(directory, "auto")  # says what there should be


def commit_of(directory: Path) -> str | None:
    """The commit that a directory of the hub's cache holds; None of any other."""
    return directory.name if directory.parent.name == "snapshots" else None


def _download(repository: str, revision: str | None, download_dir: str | None, patterns: Sequence[str]) -> Path:
    with _clear_errors(repository, revision):
        return download(repository, revision, download_dir, patterns)


def download(repository: str, revision: str | None, download_dir: str | None, patterns: Sequence[str]) -> Path:
    """Bring the files that match, and return their directory. What is raised is huggingface_hub's."""
    from huggingface_hub import snapshot_download

    path = snapshot_download(
        repository,
        revision=revision,
        cache_dir=download_dir,
        endpoint=os.environ.get("HF_ENDPOINT"),
        local_files_only=is_offline(),
        allow_patterns=list(patterns),
        ignore_patterns=list(NOT_OURS),
    )
    return Path(path)


@contextmanager
def _clear_errors(repository: str, revision: str | None) -> Iterator[None]:
    """One line that says what to change, for each way in which a download fails."""
    from httpx import HTTPError
    from huggingface_hub import errors

    def fail(reason: str, param: str = "model") -> CheckpointError:
        return CheckpointError(f"model {repository!r}: {_PASSWORD.sub('//***@', reason)}", param=param)

    hub = os.environ.get("HF_ENDPOINT", "the Hugging Face hub")
    try:
        yield
    except errors.GatedRepoError:
        raise fail(f"gated on {hub}: accept its terms there and set HF_TOKEN to a token that may read it") from None
    except errors.RevisionNotFoundError:
        raise fail(f"{hub} has no revision {revision!r} of it", "revision") from None
    except errors.RepositoryNotFoundError:
        raise fail(
            f"no such path, and no such repository on {hub}, or one that is shown with a token only (HF_TOKEN)"
        ) from None
    except errors.HFValidationError as error:
        raise fail(f"no such path, nor the name of a repository: {error}") from None
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError, errors.OfflineModeIsEnabled):
        if is_offline():
            raise fail("not (wholly) downloaded yet, and HF_HUB_OFFLINE forbids to do so now") from None
        raise fail(f"no such path, not downloaded yet, and {hub} cannot be reached") from None
    except (errors.HfHubHTTPError, HTTPError, OSError) as error:
        raise fail(f"cannot be downloaded from {hub}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Returns what an error says in one line; its name where it says nothing, as timeouts do."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def is_offline() -> bool:
    """True if the environment forbids to download."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
