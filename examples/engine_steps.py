"""The engine, driven step by step: what `LLM` and the replicas of a server do in their loops.

    .venv/bin/python examples/engine_steps.py

EngineCore takes token ids and returns token ids; text is the caller's affair. A request may come at any step.
"""

from __future__ import annotations

import secrets

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokenizer


def main() -> None:
    """Two requests, the second one five steps later."""
    config = EngineConfig(model="tiny-chat", executor="in_process", max_num_batched_tokens=64)
    info = ModelInfo.from_directory(config.model)
    tokenizer = Tokenizer.from_directory(info.directory)
    template = ChatTemplate.from_directory(info.directory, tokenizer)
    core = EngineCore(config, info, create_executor(config), secrets.token_bytes(32))
    print("\n".join(core.start().notes))

    def request(name: str, question: str) -> EngineRequest:
        text = template.render([{"role": "user", "content": question}], add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return EngineRequest(name, ids, SamplingParams(temperature=0, max_tokens=40, seed=0))

    core.add_request(request("first", "Count from 1 to 12."))
    token_ids: dict[str, list[int]] = {"first": []}
    step = 0
    while core.has_work():
        if step == 5:
            core.add_request(request("second", "What is 6 times 7?"))
            token_ids["second"] = []
        for output in core.step():
            token_ids[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                text = tokenizer.decode(token_ids[output.request_id])
                print(f"step {step}: {output.request_id} ends ({output.finish_reason}): {text!r}")
        step += 1
    stats = core.stats()
    num_tokens, is_free = stats.figures["generation_tokens"], stats.num_running == 0
    print(f"{stats.steps_total} steps, {num_tokens} tokens, all blocks free: {is_free}")
    core.shutdown()


if __name__ == "__main__":
    main()
