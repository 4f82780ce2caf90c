"""A long run of everything at once on one engine: random lengths, shared prefixes, aborts, logprobs, prompt logprobs,
filters, penalties, several choices, and a cache too small for all, so that requests are preempted.

    python -m benchmarks.soak --shape qwen3-0.6b --seconds 300 [--out results/soak.json]

Ends with exit status 1 if a request failed or ended with other than its own number of tokens, if a block is still held
once all have ended, or if the device's memory kept growing.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from app import LLM, SamplingParams
from app.records.request_state import Request
from benchmarks.offline import arguments, choices_of, make_llm, random_prompt, write

MIB = 1 << 20


@dataclass
class Tally:
    """What happened."""

    started: int = 0
    finished: int = 0
    aborted: int = 0
    tokens: int = 0
    steps: int = 0
    faults: list[str] = field(default_factory=list)


class Soak:
    """Keeps about `alive` requests in an engine."""

    def __init__(self, llm: LLM, shape: str, alive: int, longest: int) -> None:
        self.tally = Tally()
        self.requests: dict[str, Request] = {}
        self._llm, self._shape, self._alive, self._longest = llm, shape, alive, longest
        self._rng = random.Random(0)
        self._prefixes = [random_prompt(self._rng, longest // 3, shape) for _ in range(8)]

    def step(self, *, is_last: bool = False) -> None:
        """Some requests come, some are given up, the engine makes one step."""
        core, rng, tally = self._llm._core, self._rng, self.tally
        while not is_last and len(self.requests) < self._alive and rng.random() < 0.8:
            self._start()
        if self.requests and rng.random() < 0.05:
            core.abort_requests([rng.choice(list(self.requests))])
        for output in core.step():
            request = self.requests.get(output.request_id)
            if request is None:
                continue
            tally.tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                self._end(request, str(output.finish_reason), output.error)
        tally.steps += 1

    def _start(self) -> None:
        rng = self._rng
        prompt = random_prompt(rng, rng.randint(1, self._longest), self._shape)
        if rng.random() < 0.5:
            prompt = rng.choice(self._prefixes)[: rng.randint(1, self._longest // 3)] + prompt[: self._longest // 2]
        options: dict[str, Any] = {"temperature": rng.choice((0.0, 0.7, 1.0)), "n": rng.choice((1, 1, 1, 2))}
        options |= rng.choice(({}, {}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 0.5}))
        options |= rng.choice(({}, {}, {}, {"logprobs": 5}, {"prompt_logprobs": 2}))
        options["max_tokens"] = rng.randint(1, self._longest // 2)
        params = SamplingParams(ignore_eos=True, seed=rng.randint(0, 1 << 30), **options)
        for choice in choices_of(self._llm, self.tally.started, prompt, params):
            self._llm._core.enqueue(choice.request)
            self.requests[choice.request.request_id] = choice.request
            self.tally.started += 1

    def _end(self, request: Request, reason: str, error: str | None) -> None:
        del self.requests[request.request_id]
        made = len(request.token_ids) - request.num_prompt_tokens
        if "abort" in reason.lower():
            self.tally.aborted += 1
            return
        self.tally.finished += 1
        if error is not None or made != request.sampling.max_tokens:
            self.tally.faults.append(f"{request.request_id}: {reason}, {made} tokens, {error}")


def run(llm: LLM, shape: str, seconds: float, alive: int, longest: int) -> dict[str, Any]:
    """Figures of the run."""
    soak = Soak(llm, shape, alive, longest)
    begin, settled = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        soak.step()
        if not settled and time.monotonic() - begin > seconds / 3:
            settled = _device_bytes()
    while soak.requests:
        soak.step(is_last=True)
    while llm._core.has_work():
        llm._core.step()
    tally, stats, pool = soak.tally, llm.stats(), llm._core.scheduler.kv.pool
    pool.check()
    held = llm.worker_info.num_blocks - pool.num_free
    grown = _device_bytes() - settled
    if held:
        tally.faults.append(f"{held} blocks are still held")
    if grown > 64 * MIB:
        tally.faults.append(f"the device's memory grew by {grown / MIB:.0f} MiB")
    return {
        "seconds": time.monotonic() - begin, "started": tally.started, "finished": tally.finished,
        "aborted": tally.aborted, "tokens": tally.tokens, "steps": tally.steps, "held_blocks": held,
        "device_growth_mib": grown / MIB, "preemptions": stats.figures["preemptions"], "faults": tally.faults[:20],
    }  # fmt: skip


def _device_bytes() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def main() -> int:
    """Return 1 after a fault."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--alive", type=int, default=192, help="requests at a time")
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--kv-tokens", type=int, default=120_000, help="room of the KV cache")
    args = parser.parse_args()
    options = {
        "enable_prefix_caching": True,
        "max_model_len": 2 * args.longest + 96,
        "num_blocks": args.kv_tokens // 16,
    }
    with make_llm(args.shape, **{**options, **args.engine}) as llm:
        figures = run(llm, args.shape, args.seconds, args.alive, args.longest)
    for name, value in figures.items():
        print(f"{name}: {value}")
    write(args.out, {"shape": args.shape, **figures})
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
