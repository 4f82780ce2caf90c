"""The table of well-known names: its keys can be typed, and its repositories are names that the hub can have."""

from __future__ import annotations

import re

from huggingface_hub.utils import validate_repo_id

from app.checkpoints.known_models import KNOWN_MODELS, known_repository, sizes_hint


def test_every_line_can_be_used() -> None:
    for family, sizes in KNOWN_MODELS.items():
        for size, repository in sizes.items():
            assert re.fullmatch(r"[a-z0-9.-]+:(\d+x)?[\d.]+[bm]", f"{family}:{size}")
            validate_repo_id(repository)
            assert repository.count("/") == 1
            assert known_repository(f"{family}:{size}".upper()) == repository


def test_other_names_are_none() -> None:
    assert [known_repository(name) for name in ("qwen3", "qwen3:", "qwen3:0.6b:x", ":", "", "a:b")] == [None] * 6
    assert sizes_hint("gpt-oss:1b") == "; known: gpt-oss:20b, gpt-oss:120b"
    assert sizes_hint("nobody") == ""
