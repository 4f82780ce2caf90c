"""`manta run FILE`: a file of prompts to a file of answers, with the engine in this process.

Each line is a text, or JSON: {"prompt": text or token ids} or {"messages": [...]}, with sampling parameters of its
own and an `id` that comes back. Every line is checked before the first one runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import ValidationError

from app.cli.command import Command
from app.cli.engine import add_engine, start_llm
from app.cli.sampling import add_sampling, sampling_given
from app.engine.sampling_params import SamplingParams
from app.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from app.engine.outputs import RequestOutput
    from app.offline.llm import LLM


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the file: either `prompt` or `messages`."""

    where: str
    id: Any
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    sampling: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Files, model and engine, sampling."""
    parser.add_argument("file", metavar="FILE", help="prompts, one a line: text or JSON; - is standard input")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="JSONL to write (default: standard output)")
    parser.add_argument("--chat", action="store_true", help="answer text lines as chat messages instead of completing")
    add_engine(parser)
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """One JSON line for each prompt, in their order."""
    jobs = read_jobs(args.file, args.chat)
    sampling = sampling_given(args)
    for job in jobs:
        _params(job, sampling)  # a wrong line ends the command before the model is loaded
    with start_llm(args) as llm:
        defaults = llm.default_sampling_params().model_dump(exclude_unset=True)
        outputs = _run(llm, jobs, [_params(job, {**defaults, **sampling}) for job in jobs])
    with _open(args.output) as file:
        for job, output in zip(jobs, outputs, strict=True):
            file.write(json.dumps(_record(job, output), ensure_ascii=False) + "\n")
    return 0


def read_jobs(file: str, chat: bool) -> list[Job]:
    """The lines of `file` that are not blank. ConfigError names the line at fault."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot read it: {error}") from None
    lines = enumerate(text.split("\n"), 1)
    jobs = [_job(f"{file}:{number}", number - 1, line, chat) for number, line in lines if line.strip()]
    if not jobs:
        raise ConfigError(f"{file}: no prompts")
    return jobs


def _job(where: str, index: int, line: str, chat: bool) -> Job:
    entry: Any = line.rstrip("\r")
    if line.lstrip().startswith(("{", '"')):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
    if isinstance(entry, str):
        messages = [{"role": "user", "content": entry}] if chat else None
        return Job(where, index, None if chat else entry, messages, {})
    prompt, messages, own_id = entry.pop("prompt", None), entry.pop("messages", None), entry.pop("id", index)
    if (prompt is None) == (messages is None):
        raise ConfigError(f"{where}: give either prompt or messages")
    if messages is None:
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not (isinstance(prompt, str) or ids) or not prompt:
            raise ConfigError(f"{where}: prompt: expected a text or token ids")
    elif not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ConfigError(f"{where}: messages: expected a list of messages")
    return Job(where, own_id, prompt, messages, entry)


def _params(job: Job, sampling: dict[str, Any]) -> SamplingParams:
    """The line's own parameters over the command's."""
    try:
        return SamplingParams(**{**sampling, **job.sampling})
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        name = ".".join(map(str, detail["loc"])) or "sampling"
        raise ConfigError(f"{job.where}: {name}: {detail['msg']}") from None
    except InvalidRequestError as error:
        raise ConfigError(f"{job.where}: {error.message}") from None


def _run(llm: LLM, jobs: Sequence[Job], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """All jobs as one batch: chats are rendered first, so that they run with the others."""
    prompts: list[Any] = []
    for job in jobs:
        if job.messages is None:
            prompts.append(job.prompt if isinstance(job.prompt, str) else {"prompt_token_ids": job.prompt})
            continue
        try:
            prompts.append({"prompt_token_ids": llm.render_chat(job.messages)[1]})
        except InvalidRequestError as error:
            raise ConfigError(f"{job.where}: {error.message}") from None
    try:
        return llm.generate(prompts, list(params), use_tqdm=sys.stderr.isatty())
    except InvalidRequestError as error:
        raise ConfigError(_named(error.message, jobs)) from None


def _named(message: str, jobs: Sequence[Job]) -> str:
    """`prompts[3]: ...` with the line that it stands for."""
    for index, job in enumerate(jobs):
        if message.startswith(f"prompts[{index}]: "):
            return job.where + message.removeprefix(f"prompts[{index}]")
    return message


def _record(job: Job, output: RequestOutput) -> dict[str, Any]:
    choices = [
        {"index": c.index, "text": c.text, "finish_reason": c.finish_reason, "num_tokens": len(c.token_ids)}
        for c in output.outputs
    ]
    return {
        "id": job.id,
        **({"messages": job.messages} if job.prompt is None else {"prompt": job.prompt}),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "outputs": choices,
    }


@contextmanager
def _open(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from None


COMMAND = Command("answer a file of prompts without a server", add_arguments, run)
