"""Measures what quantization costs: both models over the same held-out texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from app.errors import ConfigError
from app.quantize.layerwise import FinalStates, LayerwiseModel
from app.quantize.token_batch import TokenBatch

FILE = "quantization_report.json"
_ROWS = 256  # logits of so many tokens at once


@dataclass(slots=True)
class LogitErrors:
    """Differences of the quantized model's logits from the original's, over all places of the texts."""

    max_error: float = 0.0
    mean_error: float = 0.0  # of the absolute differences
    kl_divergence: float = 0.0  # of the next token's distribution, nats
    same_top_token: float = 0.0  # share of places where the most likely token is the same


@dataclass(slots=True)
class Perplexity:
    """exp of the mean negative log likelihood of each token but a text's first."""

    original: float = 0.0
    quantized: float = 0.0


@dataclass(slots=True)
class AccuracyReport:
    """Both models over texts that nothing was calibrated with."""

    num_texts: int
    num_tokens: int
    perplexity: Perplexity
    logits: LogitErrors
    answers: dict[str, int] = field(default_factory=dict)  # of a model that brings questions; see questions.py

    def save(self, directory: Path, settings: dict[str, Any]) -> None:
        """Beside the checkpoint, with how it was made. ConfigError where it cannot be written."""
        try:
            (directory / FILE).write_text(json.dumps({**settings, **asdict(self)}, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"OUTPUT: the checkpoint is complete, but {directory / FILE} cannot be written: {error.strerror}"
            ) from error

    def table(self) -> list[str]:
        """A few lines for people."""
        p, e = self.perplexity, self.logits
        rows = [
            ("held-out texts", f"{self.num_texts}, {self.num_tokens} tokens", ""),
            ("perplexity", f"{p.original:.4f}", f"{p.quantized:.4f}"),
            ("logit error, mean / largest", "", f"{e.mean_error:.4f} / {e.max_error:.3f}"),
            ("KL divergence, nats", "", f"{e.kl_divergence:.5f}"),
            ("same most likely token", "", f"{e.same_top_token:.2%}"),
        ]
        if self.answers:
            questions = self.answers["questions"]
            original, quantized = (f"{self.answers[side]} of {questions}" for side in ("original", "quantized"))
            rows.append(("right answers", original, quantized))
        head = f"{'':<28} {'original':>18} {'quantized':>18}"
        return [head, *(f"{name:<28} {a:>18} {b:>18}" for name, a, b in rows)]


def compare(original: LayerwiseModel, quantized: LayerwiseModel, texts: Sequence[Sequence[int]]) -> AccuracyReport:
    """Run both, one after the other."""
    batches = TokenBatch.split(texts)
    states = original.run(batches), quantized.run(batches)
    return measure(batches, *states)


@torch.inference_mode()
def measure(batches: Sequence[TokenBatch], original: FinalStates, quantized: FinalStates) -> AccuracyReport:
    """The figures, from what came out of both models."""
    errors, losses = LogitErrors(), [0.0, 0.0]
    num_places = num_predicted = num_logits = 0
    for targets, *pair in _logits(batches, original, quantized):
        difference = (pair[0] - pair[1]).abs()
        errors.max_error = max(errors.max_error, float(difference.max()))
        errors.mean_error += float(difference.sum(dtype=torch.float64))
        logprobs = [logits.log_softmax(-1) for logits in pair]
        errors.kl_divergence += float((logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(dtype=torch.float64))
        errors.same_top_token += int((pair[0].argmax(-1) == pair[1].argmax(-1)).sum())
        places = (targets >= 0).nonzero()[:, 0]
        for side, own in enumerate(logprobs):
            losses[side] -= float(own[places, targets[places]].sum(dtype=torch.float64))
        num_places, num_predicted = num_places + len(targets), num_predicted + len(places)
        num_logits += difference.numel()
    errors.mean_error /= num_logits
    errors.kl_divergence /= num_places
    errors.same_top_token /= num_places
    perplexity = Perplexity(*(math.exp(loss / num_predicted) for loss in losses))
    return AccuracyReport(sum(len(batch.texts) for batch in batches), num_places, perplexity, errors)


def _logits(batches: Sequence[TokenBatch], *models: FinalStates) -> Iterator[tuple[torch.Tensor, ...]]:
    """Next tokens [N] (-1: a text ends there), and each model's logits fp32 [N, V], of some places."""
    device = models[0].last.forward.cache.tensors[0].device
    for number, batch in enumerate(batches):
        targets = torch.tensor([token for text in batch.texts for token in (*text[1:], -1)], device=device)
        for start in range(0, len(targets), _ROWS):
            rows = slice(start, start + _ROWS)
            logits = (model.last.logits(model.hidden[number][rows].to(device)) for model in models)
            yield targets[rows], *logits
