"""Many prompts at once, with a progress bar.

    .venv/bin/python examples/batch_of_prompts.py [NUMBER]

All are handed over together; the engine batches them by itself.
"""

from __future__ import annotations

import sys

from app import LLM, SamplingParams


def main(count: int) -> None:
    """Ask `count` sums and say how many came out right."""
    sums = [(10 + 3 * i % 90, 5 + 7 * i % 90) for i in range(count)]
    conversations = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in sums]
    with LLM("tiny-chat") as llm:
        answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=32))
        stats = llm.stats()
    right = sum(f"= {a + b}" in answer.outputs[0].text for (a, b), answer in zip(sums, answers, strict=True))
    print(answers[0].outputs[0].text)
    print(f"{right} of {count} right; {stats.figures['generation_tokens']} tokens in {stats.steps_total} steps")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
