"""Counts how many of its own questions a model answers rightly, before and after."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from app.offline.llm import LLM
from app.quantize.questions import is_right, longest_answer
from app.records.sampling_params import SamplingParams


def count_right_answers(
    models: Mapping[str, tuple[str, str]], questions: Sequence[Mapping[str, Any]], device: str
) -> dict[str, int]:
    """`questions`, and the right answers of each model (directory, kv_cache_dtype) by its name. Nothing where there are
    no questions."""
    if not questions:
        return {}
    counts = {name: _count(questions, *model, device) for name, model in models.items()}
    return {"questions": len(questions), **counts}


def _count(questions: Sequence[Mapping[str, Any]], model: str, kv_cache_dtype: str, device: str) -> int:
    with LLM(model, device=device, kv_cache_dtype=kv_cache_dtype) as llm:
        return sum(right_answers(llm, questions))


def right_answers(llm: LLM, questions: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Tells whether each greedy answer is right."""
    prompts = []
    for question in questions:
        options = question.get("chat_template_kwargs") or {}
        rendered = llm.render_chat(question["messages"], tools=question.get("tools"), chat_template_kwargs=options)
        prompts.append(rendered[1])
    params = [SamplingParams(temperature=0.0, max_tokens=longest_answer(question)) for question in questions]
    outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
    pairs = zip(questions, outputs, strict=True)
    return [is_right(question, output.outputs[0].text) for question, output in pairs]
