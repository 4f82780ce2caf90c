"""The drafter `eagle`: EAGLE-1 and EAGLE-2, of which chains are drafted."""

from __future__ import annotations

from functools import partial
from typing import Self

from app.loading.loader import load_drafter
from app.models.drafters.base import Drafter
from app.models.drafters.eagle import EagleDrafter
from app.worker.spec_decode.base import ProposerContext
from app.worker.spec_decode.chain import ChainProposer
from app.worker.spec_decode.weights import DrafterSource, target_of


class EagleProposer(ChainProposer):
    """A chain of one layer."""

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        source = DrafterSource.of(context)

        def load() -> Drafter:
            kind = partial(
                EagleDrafter,
                target=target_of(context),
                has_embedding=source.holds("embed_tokens.weight"),
                has_bias=source.holds("fc.bias"),
            )
            return load_drafter(kind, source.info, source.build, source.form)

        return cls.of(context, (), load)
