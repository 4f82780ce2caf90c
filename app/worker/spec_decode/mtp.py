"""The drafter `mtp`: a further layer of the target's own checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Self

from app.loading.loader import format_named, load_drafter
from app.models.drafters.base import Drafter
from app.models.drafters.mtp import MtpDrafter, check_mtp
from app.worker.spec_decode.base import ProposerContext
from app.worker.spec_decode.chain import ChainProposer
from app.worker.spec_decode.weights import build_context, target_of


class MtpProposer(ChainProposer):
    """A chain of the layer behind the last."""

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        check_mtp(context.info)

        def load() -> Drafter:
            form = format_named(context.info, context.config.load_format)
            kind = partial(MtpDrafter, target=target_of(context))
            return load_drafter(kind, context.info, build_context(context), form)

        return cls.of(context, (), load)
