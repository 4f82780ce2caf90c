"""`LLM.beam_search`: the searches of several prompts at once over one engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from app.api.generation.request_builder import RequestBuilder
from app.beams.search import Beam, BeamSearch, BeamSearchParams, as_output
from app.errors import MantaError
from app.offline.engine_loop import EngineLoop
from app.offline.prompts import Encoded, at_prompt
from app.records.outputs import CompletionOutput, EngineOutput
from app.records.request import EngineRequest
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs
from app.text.output_processor import OutputProcessor
from app.text.served_model import ServedModel


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam, under the names that vLLM gives it."""

    tokens: list[int]  # prompt and output
    logprobs: list[TokenLogprobs]  # one for each output token
    cum_logprob: float
    score: float  # cum_logprob / (output tokens) ** length_penalty
    text: str  # the output's
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    num_cached_tokens: int = 0  # prompt and output tokens of all steps that were found in the prefix cache
    num_computed_tokens: int = 0  # those that were computed


@dataclass(slots=True)
class _Job:
    """A running search."""

    search: BeamSearch
    result: BeamSearchOutput
    asked: EngineRequest  # for the whole search
    num_sent: int = 0  # requests for its steps
    came: dict[int, TokenLogprobs] = field(default_factory=dict)  # by beam, of the step under way

    def take(self, beam: int, output: EngineOutput) -> bool:
        """Add what came for a running beam; True when the step is complete, and the search is one further."""
        if not output.logprobs:
            raise MantaError(f"request {output.request_id} failed: {output.error or output.finish_reason}")
        self.came[beam] = output.logprobs[0]
        self.result.num_cached_tokens += output.num_cached_tokens
        num_tokens = len(self.search.prompt_token_ids) + len(self.search.running[beam].logprobs)
        self.result.num_computed_tokens += num_tokens - output.num_cached_tokens
        if len(self.came) < len(self.search.running):
            return False
        self.search.advance([self.came[i] for i in range(len(self.came))])
        self.came.clear()
        return True


class BeamSearches:
    """Searches with one model that generates."""

    def __init__(self, loop: EngineLoop, model: ServedModel) -> None:
        self._loop = loop
        self._model = model

    def run(self, prompts: Sequence[Encoded], params: BeamSearchParams, use_tqdm: bool) -> list[BeamSearchOutput]:
        """The best continuations of each prompt, see LLM.beam_search."""
        jobs = [self._begin(i, prompt, params) for i, prompt in enumerate(prompts)]
        waiting: dict[str, tuple[_Job, int]] = {}  # by request: whose beam it computes, and which
        with tqdm(total=len(jobs), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:

            def take(output: EngineOutput) -> None:
                job, i = waiting.pop(output.request_id)
                if job.take(i, output):
                    self._loop.send(self._step(job, waiting))
                    bar.update(not job.search.running)

            self._loop.run((request for job in jobs for request in self._step(job, waiting)), take)
        for job in jobs:
            job.result.sequences = [self._shown(beam, job) for beam in job.search.finished]
        return [job.result for job in jobs]

    def _begin(self, index: int, prompt: Encoded, params: BeamSearchParams) -> _Job:
        info = self._model.info
        text_params = SamplingParams(
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        with at_prompt(index):  # the whole of it must fit, although it is asked for token by token
            builder = RequestBuilder(self._model, text_params)
            [asked] = builder.choices(f"beam-{self._loop.new_id()}", prompt.token_ids, prompt.asks)
        max_tokens = asked.sampling.max_tokens
        assert max_tokens is not None, "settled"
        eos = () if params.ignore_eos else info.eos_token_ids
        ends = frozenset((*asked.sampling.stop_token_ids, *eos))
        search = BeamSearch(asked.prompt_token_ids, params, ends, max_tokens, info.vocab_size)
        return _Job(search, BeamSearchOutput(prompt.text, prompt.token_ids, []), asked)

    def _step(self, job: _Job, waiting: dict[str, tuple[_Job, int]]) -> list[Request]:
        """Returns what the engine is asked for next in a search; `waiting` says what each request is for."""
        requests = job.search.requests(job.asked, job.num_sent)
        job.num_sent += len(requests)
        waiting.update({request.request_id: (job, i) for i, request in enumerate(requests)})
        return [self._loop.core.prepare(request) for request in requests]

    def _shown(self, beam: Beam, job: _Job) -> BeamSearchSequence:
        token_ids = job.result.prompt_token_ids
        shown = CompletionOutput(0)
        processor = OutputProcessor(self._model.tokenizer, job.asked.sampling, token_ids)
        processor.process(as_output("", beam, job.search, self._model.info.eos_token_ids)).add_to(shown)
        return BeamSearchSequence(
            [*token_ids, *beam.token_ids],
            beam.logprobs,
            beam.cumulative_logprob,
            beam.score,
            shown.text,
            str(shown.finish_reason),
            shown.stop_reason,
        )
