"""A batch job on Ray Data: each worker of the job holds an engine of its own and answers blocks of rows.

    .venv/bin/python examples/ray_data_batch.py [ROWS]        (pip install 'ray[data]')

Ray Data reads and writes the rows (here made up; files, tables and object stores as well), starts as many workers as
`compute` says, and runs a block again whose worker died. On GPUs add num_gpus=1 to `map_batches`.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import ray.data

from app import LLM, SamplingParams


class Answers:
    """One engine; Ray makes an object of it in each worker, once."""

    def __init__(self, model: str) -> None:
        self._llm = LLM(model, num_threads=1)
        self._params = SamplingParams(temperature=0, max_tokens=32)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A column more. The engine batches by itself, so blocks may be large."""
        chats = [[{"role": "user", "content": str(question)}] for question in batch["question"]]
        found = self._llm.chat(chats, self._params, use_tqdm=False)
        return {**batch, "answer": [each.outputs[0].text for each in found]}


def main(rows: int) -> None:
    """Ask `rows` sums and count those that came out right."""
    ray.init(log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    sums = [(10 + 3 * i % 90, 5 + 7 * i % 90) for i in range(rows)]
    table = ray.data.from_items([{"question": f"What is {a} + {b}?", "sum": a + b} for a, b in sums])
    answered = table.map_batches(
        Answers,
        fn_constructor_args=("tiny-chat",),
        batch_size=max(1, rows // 2),
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
    )
    right = [f"= {row['sum']}" in row["answer"] for row in answered.take_all()]
    print(f"{sum(right)} of {len(right)} right")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
