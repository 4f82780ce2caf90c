"""Two models behind one address; `model` in the request says which one answers.

    make serve CONFIG=examples/several_models.yaml
    .venv/bin/python examples/several_models.py [http://127.0.0.1:8000]

The engines are separate; ingress and router are shared.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI


def main(url: str) -> None:
    """Ask every model the same question, at the same time."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(model: str) -> str:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "What is 5 + 4?"}], temperature=0, max_tokens=32
        )
        return f"{model}: {answer.choices[0].message.content}"

    models = [model.id for model in client.models.list()]
    with ThreadPoolExecutor() as pool:
        for line in pool.map(ask, models):
            print(line)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
