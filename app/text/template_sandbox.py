"""A chat template of unknown origin, rendered in a process that can be killed.

Jinja's sandbox keeps a template from reaching Python, not from using time and memory: a few characters of template can
ask for any amount of either. So a template that a request brings runs in a process of its own, with limits that the
operating system holds. A checkpoint's is of unknown origin, too: it runs there once, before it may run anywhere else.
`python -m app.text.template_sandbox` is that process: a job in JSON in, a text in JSON out.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.errors import CheckpointError, InvalidRequestError, MantaError
from app.text.chat_template import ChatTemplate, ExcessError, RenderLimits

MEMORY_BYTES = 512 << 20  # address space of the process
START_S = 10.0  # a process on a busy machine takes its time to start; its own limit counts CPU time
PARAM = "chat_template"
TRIAL_S = 1.0  # CPU time for two messages; published templates take a thousandth of it
TRIAL_CHARS = 1 << 20
_TRIAL = [{"role": "user", "content": "Hi."}]
_TRIAL_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]
_ROOT = Path(__file__).resolve().parent.parent.parent  # the package's

logger = logging.getLogger("manta.text")


def takes_too_much(templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> bool:
    """Tells whether a model's templates exceed the trial's limits on the shortest of conversations."""
    for name, source in templates.items():
        options = {"messages": _TRIAL, "tools": _TRIAL_TOOLS if name == "tool_use" else None}
        try:
            render_untrusted(source, special_tokens, options, TRIAL_S, TRIAL_CHARS)
        except ExcessError as error:
            logger.warning("the model's chat template runs in a process of its own only: %s", error.message)
            return True
        except InvalidRequestError:  # it may refuse this conversation
            continue
    return False


def render_untrusted(
    source: str, special_tokens: Mapping[str, str], options: Mapping[str, Any], max_s: float, max_chars: int
) -> str:
    """The prompt that the template `source` makes; `options` are the arguments of ChatTemplate.render.

    InvalidRequestError when it does not parse, refuses the conversation, or exceeds a limit. Blocks its thread until
    the process has ended.
    """
    job = {"source": source, "special_tokens": dict(special_tokens), "options": dict(options)}
    limits = {"max_s": max_s, "max_chars": max_chars}
    try:
        process = subprocess.run(
            (sys.executable, "-m", "app.text.template_sandbox"),
            input=json.dumps({**job, **limits}).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PYTHONPATH": str(_ROOT), "PATH": os.defpath},
            timeout=START_S + max_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _read(b"", max_s)
    return _read(process.stdout, max_s)


def _read(out: bytes, max_s: float) -> str:
    answer = json.loads(out) if out else {}
    if "text" in answer:
        return str(answer["text"])
    if "error" in answer:
        raise InvalidRequestError(str(answer["error"]), param=PARAM)
    raise ExcessError(f"the template took more than {max_s:g} s or too much memory", param=PARAM)


def main() -> None:
    """Render the job on standard input."""
    job = json.loads(sys.stdin.buffer.read())
    seconds = max(1, math.ceil(job["max_s"]))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        template = ChatTemplate({"default": job["source"]}, job["special_tokens"])
        options = dict(job["options"])
        messages = options.pop("messages")
        limits = RenderLimits(max_s=job["max_s"], max_chars=job["max_chars"])
        text = template.render(messages, limits=limits, **options)
        answer = {"text": text}
    except ExcessError:
        return  # as where the system ends it
    except CheckpointError as error:
        answer = {"error": error.message.replace("chat template 'default'", "it")}
    except MantaError as error:
        answer = {"error": error.message}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
