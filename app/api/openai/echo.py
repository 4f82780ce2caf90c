"""The prompt put before its completion, with its logprobs where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.api.generation.render import Prompt
from app.api.openai.logprobs import TokenNames, completion_logprobs
from app.records.step import TokenLogprobs
from app.text.detokenizer import create_detokenizer
from app.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class Echo:
    """One choice's prompt as it is shown."""

    text: str
    token_ids: list[int]
    offsets: list[int]  # where each token's text begins

    @classmethod
    def of(cls, prompt: Prompt, tokenizer: Tokenizer) -> Echo:
        """Collects what to show for `prompt`: the client's own text, or that of all its token ids, special ones among
        them.
        """
        detokenizer = create_detokenizer(tokenizer, skip_special_tokens=False)
        offsets, position = [], 0
        for token_id in prompt.token_ids:
            offsets.append(position)
            if not _is_added(token_id, prompt.text, position, tokenizer):
                position += len(detokenizer.push(token_id))
        text = prompt.text
        if text is None:
            text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        return cls(text, prompt.token_ids, offsets)

    def logprobs(self, entries: Sequence[TokenLogprobs | None], tokenizer: TokenNames) -> dict[str, Any]:
        """The prompt's part of `choices[].logprobs`; the first token has none."""
        return completion_logprobs(entries, self.token_ids, self.offsets, tokenizer)


def _is_added(token_id: int, text: str | None, position: int, tokenizer: Tokenizer) -> bool:
    """True if the tokenizer put this special token beside the client's text, which then does not show it."""
    if text is None or token_id not in tokenizer.special_token_ids:
        return False
    return not text.startswith(tokenizer.token_text(token_id), position)
