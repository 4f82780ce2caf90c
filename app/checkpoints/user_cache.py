"""Finds where what was made of a user's files is kept, so that it is made once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from app.errors import CheckpointError


def user_cache(kind: str) -> Path:
    """A directory of the user's for results of this kind; where there is none to write to, one of this process."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "manta" / kind
    try:
        base.mkdir(parents=True, exist_ok=True)
        if os.access(base, os.W_OK):
            return base
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix=f"manta-{kind}-"))


def kept_files(kind: str, name: str, files: Mapping[str, bytes]) -> Path:
    """A directory with these files, and nothing else of what a name may promise: one that holds other bytes (a disk
    that failed, another's hand) is made anew."""
    digest = hashlib.sha256()
    for file, content in sorted(files.items()):
        digest.update(f"{file} {len(content)} ".encode() + content)
    key = f"{name}-{digest.hexdigest()[:32]}"

    def write(directory: Path) -> None:
        directory.mkdir()
        for file, content in files.items():
            (directory / file).write_bytes(content)

    made = made_once(kind, key, write)
    if _holds(made, files):
        return made
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch, contextlib.suppress(OSError):
        made.rename(Path(scratch) / "other")
    made = made_once(kind, key, write)
    if not _holds(made, files):
        raise CheckpointError(f"{made}: its files change while they are read; remove it", param="model")
    return made


def _holds(directory: Path, files: Mapping[str, bytes]) -> bool:
    try:
        names = {file.name for file in directory.iterdir()}
        return names == set(files) and all((directory / name).read_bytes() == own for name, own in files.items())
    except OSError:
        return False


def made_once(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The directory that `make` filled for this key, now or before; no other process sees it half filled."""
    made = user_cache(kind) / key
    if not made.is_dir():
        with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
            make(Path(scratch) / "made")
            try:
                (Path(scratch) / "made").rename(made)
            except OSError:  # another process was faster
                if not made.is_dir():
                    raise
    return made
