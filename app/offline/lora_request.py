"""The adapter of a prompt, as vLLM's users name it."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import ParameterError


@dataclass(slots=True, frozen=True)
class LoRARequest:
    """A directory as PEFT writes it. `lora_int_id` says nothing here: an adapter is known by what is in its files."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise ParameterError("lora_name: an adapter needs a name", param="lora_name")
        if self.lora_int_id < 1:
            raise ParameterError(f"lora_int_id: {self.lora_int_id} is below 1", param="lora_int_id")
