"""What ties a draft to the token before it, by hand."""

from __future__ import annotations

import torch

from app.models.drafters.token_links import CandidateSelector
from tests.models.drafters.test_fit import CONTEXT
from tests.worker.spec_decode.drafters import drawn

VOCAB, SIZE, RANK, BEST = 17, 6, 4, 3


def test_the_best_tokens_are_those_that_follow() -> None:
    made = CandidateSelector(CONTEXT, VOCAB, SIZE, RANK, BEST)
    before, behind, projection = drawn(1, VOCAB, RANK), drawn(2, VOCAB, RANK), drawn(3, RANK, SIZE)
    made.predecessor_codebook.data.copy_(before)
    made.successor_codebook.data.copy_(behind)
    made.hidden_projection.weight.data.copy_(projection)
    logits, features, tokens = drawn(4, 5, VOCAB), drawn(5, 5, SIZE), torch.tensor([0, 3, 3, 16, 9])
    found = made(logits, features, tokens)
    for row, token in enumerate(tokens.tolist()):
        kept = logits[row].argsort(descending=True)[:BEST].tolist()
        for other in range(VOCAB):
            edge = (before[token] * (projection @ features[row]) * behind[other]).sum()
            expected = logits[row, other] + edge if other in kept else torch.tensor(float("-inf"))
            torch.testing.assert_close(found[row, other], expected)
