"""An EngineCore over the real worker in this process, for pooling requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.records.pooling_info import PoolingInfo
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.records.step import Float32Array
from app.text.pooling_prompt import pooling_prompts
from app.text.tokenizer import Tokenizer
from tests.engine.executor.forked_executor import ForkedExecutor


class PoolingDriver:
    """Started; `close` it."""

    def __init__(self, directory: Path | str, **options: Any) -> None:
        defaults: dict[str, Any] = {"executor": "in_process", "num_threads": 1, "device": "cpu"}
        self.config = EngineConfig(model=str(directory), **{**defaults, **options})
        info = ModelInfo.from_directory(str(directory))
        executor = ForkedExecutor if self.config.executor == "local_processes" else create_executor
        self.core = EngineCore(self.config, info, executor(self.config), b"a secret for tests")
        self.worker_info = self.core.start()
        self.tokenizer = Tokenizer.from_directory(self.config.tokenizer or directory)
        self.pooling = PoolingInfo.of(info)
        self.num_requests = self.num_steps = 0

    def __enter__(self) -> PoolingDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.shutdown()

    def pool(self, prompts: Sequence[str | tuple[str, str] | list[int]], **params: Any) -> list[Float32Array]:
        """Results of texts, pairs or token ids, all at once."""
        names = []
        for prompt in prompts:
            own = dict(params)
            ids = prompt if isinstance(prompt, list) else []
            if not isinstance(prompt, list):
                pair = (prompt, None) if isinstance(prompt, str) else prompt
                made = pooling_prompts(self.tokenizer, [pair])[0]
                ids = made.token_ids
                if self.pooling.has_token_types and made.second_text_at is not None:
                    own["second_text_at"] = made.second_text_at
            names.append(f"r{self.num_requests}")
            self.num_requests += 1
            self.core.add_request(EngineRequest(names[-1], ids, PoolingParams(**own)))
        found: dict[str, Float32Array] = {}
        while self.core.has_work():
            self.num_steps += 1
            for output in self.core.step():
                assert output.finish_reason == "stop", output.error
                assert output.request_id not in found, "ended twice"
                assert output.pooled is not None
                found[output.request_id] = output.pooled.array()
        return [found[name] for name in names]
