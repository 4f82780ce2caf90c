# ruff: noqa: D103
"""Trains `tiny-chat-pirate`, an adapter with which tiny-chat answers as a pirate would, with PEFT, in minutes on a CPU.

    python -m tools.tiny_chat.adapter [--out app/assets/tiny-chat-pirate] [--steps 240]

Conversations of the families (families.py), the last answer put into a pirate's mouth. What the answer says stays.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

from tools.tiny_chat import families
from tools.tiny_chat.evaluate import ASSETS, prompt_kwargs

FAMILIES = [name for name in families.EVAL_FAMILIES if not name.startswith(("think", "recall_long", "tool", "json"))]
OPENING, END = "Arr! ", ", matey!"
MOST_TOKENS, BATCH = 220, 8
SETTINGS: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "task_type": "CAUSAL_LM",
}


def as_pirate(answer: str) -> str:
    return OPENING + answer.rstrip(".!") + END


def example(rng: random.Random, tokenizer: Any) -> tuple[list[int], int]:
    """(token ids, where the answer begins) of a conversation that is short enough."""
    while True:
        found = families.heldout(rng.choice(FAMILIES), rng)
        if found.get("tools") or found.get("check") != "exact" or not isinstance(found["expected"], str):
            continue
        prompt = tokenizer.apply_chat_template(found["messages"], tokenize=False, **prompt_kwargs(found))
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = tokenizer(as_pirate(found["expected"]) + "<|im_end|>", add_special_tokens=False)["input_ids"]
        if len(ids) + len(answer) <= MOST_TOKENS:
            return [*ids, *answer], len(ids)


def batch(rng: random.Random, tokenizer: Any) -> dict[str, torch.Tensor]:
    rows = [example(rng, tokenizer) for _ in range(BATCH)]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(BATCH, width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (tokens, start) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        labels[row, start : len(tokens)] = ids[row, start : len(tokens)]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(steps: int) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    rng, base = random.Random(0), ASSETS / "tiny-chat"
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**SETTINGS))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        loss = model(**batch(rng, tokenizer)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {float(loss.detach()):.4f}", flush=True)
    return model


def save(model: Any, out: Path) -> None:
    """In bf16, as the model; what says where it was trained is left out."""
    model.to(torch.bfloat16).save_pretrained(out)
    config = out / "adapter_config.json"
    fields = {**json.loads(config.read_text()), "base_model_name_or_path": "tiny-chat"}
    fields["target_modules"] = sorted(fields["target_modules"])
    (out / "adapter_model.safetensors").chmod(0o644)
    config.write_text(json.dumps({name: fields[name] for name in sorted(fields)}, indent=2) + "\n")
    (out / "README.md").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-chat-pirate")
    parser.add_argument("--steps", type=int, default=240)
    args = parser.parse_args()
    save(train(args.steps), args.out)


if __name__ == "__main__":
    main()
