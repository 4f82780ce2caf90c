"""The built-in model in this process, without a server.

    .venv/bin/python examples/offline_inference.py

Shows a chat, a completion and several choices for one prompt.
"""

from __future__ import annotations

from app import LLM, SamplingParams


def main() -> None:
    """Load the model once, ask it three ways."""
    with LLM("tiny-chat") as llm:
        messages = [{"role": "user", "content": "What is 17 + 25?"}]
        [answer] = llm.chat(messages, SamplingParams(temperature=0), use_tqdm=False)
        print("chat:", answer.outputs[0].text)

        params = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
        [completion] = llm.generate("1, 2, 3, 4,", params, use_tqdm=False)
        choice = completion.outputs[0]
        print(f"completion: {choice.text!r}, {len(choice.token_ids)} tokens, ended by {choice.finish_reason}")

        params = SamplingParams(n=3, temperature=1.5, seed=7, max_tokens=32)
        [story] = llm.chat([{"role": "user", "content": "Tell me a story."}], params, use_tqdm=False)
        for choice in story.outputs:
            print(f"choice {choice.index}: {choice.text!r}")


if __name__ == "__main__":
    main()
