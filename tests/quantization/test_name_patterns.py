"""Patterns of a checkpoint mean what they mean to Python, and none of them hangs a start."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from app.errors import UnsupportedError
from app.quantization import select_quantization
from app.quantization.base import StoredModule
from app.quantization.name_patterns import PatternTime, check_pattern
from tests.limits import scaled_s
from tests.quantization.test_config_fields import compressed, gptq

NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 3, 12)
    for part in ("self_attn.q_proj", "mlp.gate_proj", "mlp.experts.17.down_proj", "mlp.shared_experts.up_proj")
] + ["lm_head", "model.embed_tokens"]
PUBLISHED = [
    r".*lm_head",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    r".*self_attn.*",
    r"model\.layers\.(0|1|2)\..*",
    r"model\.layers\.[0-3]\.(?!self_attn).*_proj$",
    r"^(?!.*experts).*proj",
    r"model.layers.*.mlp.gate_proj$",
    r".*\.1[0-9]\..*(?<!down)_proj",
    r"(?:.*\.)?layers\.\d+\.",
    r"",
    r"model.layers.1",
]
SLOW = r"(?:.{0,10}){0,10}.{0,10}[!?]"


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_patterns_mean_what_they_mean_to_python(pattern: str) -> None:
    check_pattern(pattern, "ignore")
    patterns = PatternTime()
    for name in NAMES:
        assert patterns.begins(pattern, name) == bool(re.match(pattern, name))
        assert patterns.is_in(pattern, name) == bool(re.search(pattern, name))


def test_a_pattern_that_takes_too_long_is_named() -> None:
    check_pattern(SLOW, "ignore")
    patterns = PatternTime(left_s=0.1)
    with pytest.raises(UnsupportedError, match=r"takes more than 10 s to be tried on names such as model\.layers"):
        patterns.begins(SLOW, NAMES[2])


def test_all_patterns_of_a_checkpoint_share_the_time() -> None:
    patterns = PatternTime()
    for _ in range(100):
        patterns.begins(r"(\w+\.?)+[!?]", NAMES[2])
    assert patterns.left_s < PatternTime().left_s


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "(" * 400 + ")" * 400,
        "a" * 5000,
        "(?:(?:a{1000}){1000}){1000}",
        "(?R)?b",
        r"(?:x{33}){,33}",
        "a{99999999999}",
    ],
    ids=range(7),
)
def test_what_is_no_pattern_or_too_large_is_named(pattern: str) -> None:
    with pytest.raises(UnsupportedError, match=r"ignore: .* (is no pattern|is longer than)"):
        check_pattern(pattern, "ignore")


HOSTILE = r"(\w+\.?)+!"
SCHEMES: dict[str, dict[str, Any]] = {
    "ignore": {**compressed(), "ignore": ["re:" + HOSTILE]},
    "dynamic": gptq(dynamic={"-:" + HOSTILE: {}}),
    "extra_config": {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "extra_config": {HOSTILE: {"bits": 8}},
    },
    "layers": {
        "quant_method": "quark",
        "layer_quant_config": {"re:" + HOSTILE: {}},
        "exclude": ["re:" + HOSTILE],
        "global_quant_config": {},
    },
}
CODE = """
from tests.quantization.test_name_patterns import SCHEMES, method_of_all
for scheme in SCHEMES.values():
    method_of_all(scheme)
"""


def method_of_all(scheme: dict[str, Any]) -> None:
    """Ask for the method of each module, as a start does."""
    method, _ = select_quantization(None, scheme, torch.device("cpu"), torch.float32)
    for name in NAMES:
        method.method_of(StoredModule(name, "linear", torch.float32, 256, 256))


def test_no_pattern_of_a_checkpoint_hangs_a_start() -> None:
    """In a process of its own: what hangs holds the interpreter's lock."""
    done = subprocess.run([sys.executable, "-c", CODE], timeout=scaled_s(60), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
