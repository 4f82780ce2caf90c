"""Finds where what was made of a user's files is kept, so that it is made once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


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
