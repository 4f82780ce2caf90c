"""The drafter `eagle3`."""

from __future__ import annotations

from functools import partial
from typing import Self

from app.loading.loader import load_drafter
from app.models.drafters.base import Drafter
from app.models.drafters.eagle3 import Eagle3Drafter, layers_read
from app.worker.spec_decode.base import ProposerContext
from app.worker.spec_decode.chain import ChainProposer
from app.worker.spec_decode.weights import DrafterSource, target_of


class Eagle3Proposer(ChainProposer):
    """A chain of one layer over several of the target's."""

    @classmethod
    def create(cls, context: ProposerContext) -> Self:
        """See Proposer."""
        source = DrafterSource.of(context)
        reads_layers = layers_read(source.info.hf_config, context.info.num_layers)

        def load() -> Drafter:
            has_embedding = source.holds("embed_tokens.weight") or source.is_random
            norms_heads = source.holds("self_attn.q_norm.weight")
            kind = partial(
                Eagle3Drafter, target=target_of(context), has_embedding=has_embedding, norms_heads=norms_heads
            )
            return load_drafter(kind, source.info, source.build, source.form)

        return cls.of(context, reads_layers, load)
