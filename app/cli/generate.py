"""`manta generate`: answer prompts with the engine in this process, without a server."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from app.cli.command import Command
from app.cli.engine import add_engine, start_llm
from app.cli.sampling import add_sampling, sampling_given
from app.errors import ConfigError
from app.records.sampling_params import SamplingParams

if TYPE_CHECKING:
    from app.offline.llm import LLM
    from app.records.outputs import RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompts, model and engine, sampling."""
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="texts; standard input when none is given")
    parser.add_argument(
        "--raw", action="store_true", help="complete the text instead of answering it as a chat message"
    )
    add_engine(parser)
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """Print each answer; with several prompts or choices, a line before each says which."""
    prompts = args.prompt or [sys.stdin.read()]
    if not all(prompt.strip() for prompt in prompts):
        raise ConfigError("PROMPT: an empty prompt")
    sampling_given(args)  # before the model is loaded
    with start_llm(args) as llm:
        params = SamplingParams(**sampling_given(args, llm.default_sampling_params().model_dump(exclude_unset=True)))
        outputs = _answers(llm, prompts, params, args.raw)
    for prompt, output in zip(prompts, outputs, strict=True):
        for choice in output.outputs:
            if len(prompts) > 1 or params.n > 1:
                print(f"# {prompt.strip().splitlines()[0][:80]}" + (f" [{choice.index}]" if params.n > 1 else ""))
            print(choice.text)
    return 0


def _answers(llm: LLM, prompts: list[str], params: SamplingParams, raw: bool) -> list[RequestOutput]:
    show = sys.stderr.isatty() and len(prompts) > 1
    if raw:
        return llm.generate(list(prompts), params, use_tqdm=show)
    return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params, use_tqdm=show)


COMMAND = Command("answer prompts without a server", add_arguments, run)
