"""Beam search over an engine that generates: the beams of one prompt, step by step.

The engine knows nothing of beams. At each step every beam is a request of its own for one token and the most likely
tokens there; beams that grew from one prefix share its blocks through the prefix cache, so a step computes no more than
the last, unfilled block of each. Whoever drives a search (`LLM`, the HTTP API) sends `requests` and returns what came
to `advance`, until there are no more.

Which beams stay, when a search ends and how finished ones are ordered is what transformers' `generate(num_beams=k,
do_sample=False)` does, so both give the same tokens: a finished beam's score is its summed logprob divided by
(output tokens, the end token included) ** length_penalty.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field

from app.records.outputs import EngineOutput
from app.records.params import Params
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs

EarlyStopping = bool | Literal["never"]


class BeamSearchParams(Params):
    """Says how wide to search, and when to stop. What would sample (temperature, penalties, ...) has no place here."""

    beam_width: int = Field(ge=1, description="Beams kept at each step, and returned at the end.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of a beam; what the context holds when None.")
    min_tokens: int = Field(0, ge=0, description="Tokens before a beam may end.")
    ignore_eos: bool = Field(False, description="Go on after the end-of-sequence token.")
    stop_token_ids: tuple[int, ...] = Field((), description="Token ids that end a beam, besides the model's own.")
    length_penalty: float = Field(
        1.0, ge=-10.0, le=10.0, description="Power of the length that a score is divided by; above 0 favours long."
    )
    early_stopping: EarlyStopping = Field(
        False,
        description="True: end once beam_width beams have finished; false: when no running beam looks better at its "
        'present length; "never": only when none can become better at any length.',
    )
    include_stop_str_in_output: bool = Field(False, description="Show the token that ended a beam in its text.")
    temperature: float = Field(0.0, ge=0.0, le=0.0, description="Only 0: beams are ranked by the model's own logprobs.")


@dataclass(slots=True, frozen=True)
class Beam:
    """A continuation of the prompt, running or finished."""

    cumulative_logprob: float
    logprobs: list[TokenLogprobs]  # one per token of the output, which each begins with
    finish_reason: Literal["stop", "length"] | None = None
    score: float = 0.0  # what a finished one is ranked by

    @property
    def token_ids(self) -> list[int]:
        """Its output, as a new list."""
        return [entry.token_ids[0] for entry in self.logprobs]

    def grown(self, entry: TokenLogprobs, place: int, num_shown: int) -> Beam:
        """This beam and the token at `place` of `entry`, with the `num_shown` most likely beside it."""
        token_id, logprob = entry.token_ids[place], entry.logprobs[place]
        shown = slice(1, 1 + num_shown)
        logprobs = TokenLogprobs(
            [token_id, *entry.token_ids[shown]],
            [logprob, *entry.logprobs[shown]],
            [entry.ranks[place], *entry.ranks[shown]],
        )
        total = self.cumulative_logprob + logprob
        return Beam(total, [*self.logprobs, logprobs])


@dataclass(slots=True)
class BeamSearch:
    """One prompt's search. `end_token_ids` are all that end a beam; `num_shown` most likely tokens are kept a position.

    `max_tokens` has been resolved by the caller: prompt and output fit the context.
    """

    prompt_token_ids: list[int]
    params: BeamSearchParams
    end_token_ids: frozenset[int]
    max_tokens: int
    vocab_size: int
    num_shown: int = 0
    running: list[Beam] = field(default_factory=lambda: [Beam(0.0, [])])  # best first; empty once the search ended
    finished: list[Beam] = field(default_factory=list)  # best first, at most beam_width

    def _step_params(self, prompt_logprobs: int | None) -> SamplingParams:
        """Returns what each beam asks of the engine: one token, and enough likely ones that no candidate is missed.

        The token itself is not used, so nothing but the logprobs depends on these parameters.
        """
        wanted = max(self._num_candidates + len(self.end_token_ids), self.num_shown)
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            seed=0,
            logprobs=min(wanted, self.vocab_size),
            prompt_logprobs=prompt_logprobs,
        )

    def requests(self, asked: EngineRequest, number: int) -> list[EngineRequest]:
        """Returns what to ask the engine for next, one request for each running beam; [] when the search has ended.

        They are like `asked`, the request for the whole search, and numbered from `number` on, which begins with 0.
        """
        work = self._step_params(None if number else asked.sampling.prompt_logprobs)
        return [
            replace(
                asked,
                request_id=f"{asked.request_id}-{number + i}",
                prompt_token_ids=self.prompt_token_ids + beam.token_ids,
                work=work,
                choice_index=0,
                arrival_time=time.time(),
            )
            for i, beam in enumerate(self.running)
        ]

    @property
    def _num_candidates(self) -> int:
        """So many that `beam_width` are left to go on with even if all the others end."""
        return max(2, 1 + len(self.end_token_ids)) * self.params.beam_width

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """One step: `entries[i]` are the logprobs that the engine gave for `requests()[i]`, chosen token first."""
        candidates = self._candidates(entries)
        num_tokens = len(candidates[0].logprobs)
        width = self.params.beam_width
        self._take_finished(candidates[:width])
        self.running = [beam for beam in candidates if not self._ends(beam)][:width]
        if num_tokens >= self.max_tokens or self._is_over(num_tokens):
            self.running = []

    def _candidates(self, entries: Sequence[TokenLogprobs]) -> list[Beam]:
        """The most likely continuations of all running beams, best first."""
        barred: frozenset[int] = frozenset()
        if len(self.running[0].logprobs) < self.params.min_tokens:
            barred = self.end_token_ids
        found = [
            (beam.cumulative_logprob + entry.logprobs[place], beam, entry, place)
            for beam, entry in zip(self.running, entries, strict=True)
            for place in range(1, len(entry.token_ids))  # the first is the chosen one, which comes again
            if entry.token_ids[place] not in barred
        ]
        found.sort(key=lambda candidate: -candidate[0])
        return [beam.grown(entry, place, self.num_shown) for _, beam, entry, place in found[: self._num_candidates]]

    def _ends(self, beam: Beam) -> bool:
        return beam.logprobs[-1].token_ids[0] in self.end_token_ids

    def _take_finished(self, best: list[Beam]) -> None:
        """Only the best `beam_width` candidates may finish: the others are there to go on with."""
        is_last_step = len(best[0].logprobs) >= self.max_tokens
        for beam in best:
            if self._ends(beam) or is_last_step:
                score = beam.cumulative_logprob / len(beam.logprobs) ** self.params.length_penalty
                reason: Literal["stop", "length"] = "stop" if self._ends(beam) else "length"
                self.finished.append(Beam(beam.cumulative_logprob, beam.logprobs, reason, score))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.params.beam_width :]

    def _is_over(self, num_tokens: int) -> bool:
        """True if the running beams are not expected to improve on what has finished."""
        params = self.params
        if not self.running:
            return True
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        at_best = params.early_stopping == "never" and params.length_penalty > 0
        length = self.max_tokens if at_best else num_tokens
        best_possible: float = self.running[0].cumulative_logprob / length**params.length_penalty
        return best_possible <= self.finished[-1].score


def as_output(request_id: str, beam: Beam, search: BeamSearch, eos_token_ids: Sequence[int]) -> EngineOutput:
    """A finished beam as an engine that generated it would have reported it, all at once."""
    last = beam.logprobs[-1].token_ids[0]
    is_eos = last in eos_token_ids and not search.params.ignore_eos
    stop_reason = last if beam.finish_reason == "stop" and not is_eos else None
    return EngineOutput(request_id, beam.token_ids, beam.finish_reason, stop_reason, logprobs=beam.logprobs)
