"""Says what a pooling request asks for: the counterpart of SamplingParams for models that give vectors instead of
tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.bounds import Count
from app.records.params import Params

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "all"]


class PoolingParams(Params):
    """Says how the hidden states of a prompt become its result, fp32: a vector, one for each token, or class scores."""

    task: PoolingTask = Field(
        "embed",
        description="A vector of the text, one of each token, or scores of classes, of the text or each token (of "
        "BGE-M3: the token's weight); `all` of these, where a model has a vector and both of tokens.",
    )
    dimensions: Count | None = Field(
        None, ge=1, description="Keep the first so many entries of an embedding (Matryoshka models)."
    )
    use_activation: bool | None = Field(
        None,
        description="Bring embeddings to length 1, turn logits of classes into probabilities; when not given, as the "
        "model's own files say.",
    )
    second_text_at: Count | None = Field(
        None, ge=1, description="Where the second text of a pair begins, for models that tell the two apart."
    )

    num_skipped: Count | None = Field(
        None,
        ge=1,
        description="How many of the first tokens count for nothing in a text's mean, of models whose prompts do.",
    )

    @property
    def is_of_tokens(self) -> bool:
        """True if there is a result for each token, for which a prefix cache holds too little."""
        return self.task in ("token_embed", "token_classify", "all")
