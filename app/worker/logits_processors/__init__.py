"""Edits to the logits before a token is chosen, in the order in which they apply: one file and one line each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.backends import EXTRA_LOGITS_PROCESSORS
from app.registry import Registry
from app.worker.logits_processors.base import LogitsProcessor

LOGITS_PROCESSORS: Registry[type[LogitsProcessor]] = Registry(
    "logits processor",
    {
        "grammar": "app.worker.logits_processors.grammar:Grammar",
        "allowed_token_ids": "app.worker.logits_processors.allowed_token_ids:AllowedTokenIds",
        "bad_words": "app.worker.logits_processors.bad_words:BadWords",
        "min_tokens": "app.worker.logits_processors.min_tokens:MinTokens",
        "logit_bias": "app.worker.logits_processors.logit_bias:LogitBias",
        "penalties": "app.worker.logits_processors.penalties:Penalties",
        "transcription": "app.worker.logits_processors.transcription:Transcription",
        "thinking_budget": "app.worker.logits_processors.thinking_budget:ThinkingBudget",
    },
)


def create_logits_processors(
    vocab_size: int, device: torch.device, plugins: Sequence[str] = ()
) -> list[LogitsProcessor]:
    """The `plugins`, then one processor of each kind, in the order of the table: what one of ours forbids no plugin can
    allow again."""
    extra = [EXTRA_LOGITS_PROCESSORS.load(name)(vocab_size, device) for name in plugins]
    return [*extra, *(LOGITS_PROCESSORS.load(name)(vocab_size, device) for name in LOGITS_PROCESSORS)]
