"""`LLM.beam_search`: the searches of several prompts at once over one engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from app.api.engine_client import ServedModel
from app.api.request_builder import RequestBuilder
from app.beams.search import Beam, BeamSearch, BeamSearchParams, as_output
from app.engine.core import EngineCore
from app.engine.outputs import CompletionOutput, EngineOutput
from app.engine.request import EngineRequest
from app.engine.sampling_params import SamplingParams
from app.engine.step import TokenLogprobs
from app.errors import InvalidRequestError, MantaError
from app.offline.pooling import Prompt
from app.text.output_processor import OutputProcessor
from app.text.tokenizer import Tokenizer


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


class BeamSearchMethods:
    """`beam_search`, for a model that generates."""

    tokenizer: Tokenizer
    _core: EngineCore
    _model: ServedModel

    def _parse(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of a prompt in any of its forms."""
        raise NotImplementedError

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` best continuations of each prompt; prompts have the forms of `generate`.

        Raises InvalidRequestError or PromptTooLongError, before anything runs, naming the prompt at fault, and
        MantaError when the engine fails on one.
        """
        several: list[Prompt] = [prompts] if isinstance(prompts, str | dict) else list(prompts)  # type: ignore[arg-type]
        if several and isinstance(several[0], int):
            several = [several]  # type: ignore[list-item]
        jobs = [self._begin_search(i, prompt, params) for i, prompt in enumerate(several)]
        waiting: dict[str, tuple[_Job, int]] = {}  # by request: whose beam it computes, and which
        try:
            with tqdm(total=len(jobs), desc="Prompts", unit="prompt", disable=not use_tqdm) as bar:
                for job in jobs:
                    self._send_step(job, waiting)
                while self._core.has_work():
                    bar.update(sum(self._take_step(output, waiting) for output in self._core.step()))
        finally:  # after an interrupt, the next call finds an empty engine
            self._core.abort_requests(list(waiting))
            while self._core.has_work():
                self._core.step()
        for job in jobs:
            job.result.sequences = [self._beam_shown(beam, job) for beam in job.search.finished]
        return [job.result for job in jobs]

    def _begin_search(self, index: int, prompt: Prompt, params: BeamSearchParams) -> _Job:
        text, token_ids = self._parse(prompt)
        info = self._core.info
        text_params = SamplingParams(
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        try:  # the whole of it must fit, although it is asked for token by token
            [asked] = RequestBuilder(self._model, text_params).choices(f"beam-{index}", token_ids)
        except InvalidRequestError as error:
            raise type(error)(f"prompts[{index}]: {error.message}", param=error.param) from error
        max_tokens = asked.sampling.max_tokens
        assert max_tokens is not None, "settled"
        eos = () if params.ignore_eos else info.eos_token_ids
        ends = frozenset((*asked.sampling.stop_token_ids, *eos))
        search = BeamSearch(token_ids, params, ends, max_tokens, info.vocab_size)
        return _Job(search, BeamSearchOutput(text, token_ids, []), asked)

    def _send_step(self, job: _Job, waiting: dict[str, tuple[_Job, int]]) -> None:
        """Ask the engine for the next step of a search."""
        requests = job.search.requests(job.asked, job.num_sent)
        job.num_sent += len(requests)
        for i, request in enumerate(requests):
            self._core.add_request(request)
            waiting[request.request_id] = job, i

    def _take_step(self, output: EngineOutput, waiting: dict[str, tuple[_Job, int]]) -> bool:
        """Add what came to its search; True when that search has ended."""
        if output.request_id not in waiting:
            return False
        job, i = waiting[output.request_id]
        if not output.logprobs:
            raise MantaError(f"request {output.request_id} failed: {output.error or output.finish_reason}")
        del waiting[output.request_id]
        job.came[i] = output.logprobs[0]
        job.result.num_cached_tokens += output.num_cached_tokens
        num_tokens = len(job.search.prompt_token_ids) + len(job.search.running[i].logprobs)
        job.result.num_computed_tokens += num_tokens - output.num_cached_tokens
        if len(job.came) < len(job.search.running):
            return False
        job.search.advance([job.came[beam] for beam in range(len(job.came))])
        job.came.clear()
        self._send_step(job, waiting)
        return not job.search.running

    def _beam_shown(self, beam: Beam, job: _Job) -> BeamSearchSequence:
        token_ids = job.result.prompt_token_ids
        shown = CompletionOutput(0)
        processor = OutputProcessor(self.tokenizer, job.asked.sampling, token_ids)
        processor.process(as_output("", beam, job.search, self._core.info.eos_token_ids)).add_to(shown)
        return BeamSearchSequence(
            [*token_ids, *beam.token_ids],
            beam.logprobs,
            beam.cumulative_logprob,
            beam.score,
            shown.text,
            str(shown.finish_reason),
            shown.stop_reason,
        )
