"""Options made from pydantic classes."""

from __future__ import annotations

import argparse
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from app.cli.configuration import SERVE_OPTIONS
from app.cli.options import Option, add_options, build, given, options_of
from app.config.engine import EngineConfig
from app.config.frozen import Frozen
from app.config.ingress import IngressConfig
from app.config.model import ModelConfig
from app.config.router import RouterConfig
from app.errors import ConfigError
from tests.cli.conftest import Manta


class Inner(BaseModel):
    depth: int = Field(3, description="How deep.")


class Sample(BaseModel):
    count: int = Field(1, ge=1, description="How many, 100 % sure.")
    share: float | None = Field(None, description="A part.")
    kind: Literal["a", "b"] = "a"
    on: bool = Field(True, description="Switch.")
    words: tuple[str, ...] = ()
    numbers: tuple[int, ...] | None = None
    table: dict[int, float] | None = None
    some_text: str = Field(description="Required.")
    inner: Inner = Inner()


OPTIONS = tuple(options_of(Sample))


def parse(*argv: str) -> dict[tuple[str, ...], Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, "sample", OPTIONS)
    return given(parser.parse_args(argv), OPTIONS)


def test_flags_and_paths() -> None:
    flags = {option.flag: option.path for option in OPTIONS}
    assert flags["--some-text"] == ("some_text",)
    assert flags["--inner-depth"] == ("inner", "depth")
    assert len(flags) == 9


def test_only_what_was_given() -> None:
    assert parse() == {}
    assert parse("--count", "5", "--no-on") == {("count",): "5", ("on",): False}


def test_types_are_the_classs() -> None:
    values = parse("--count", "5", "--share", "0.5", "--words", "x y", "--words", "z", "--numbers", "1", "--numbers",
                   "2", "--table", '{"7": -1.5}', "--some-text", "12")  # fmt: skip
    sample = build(Sample, values, OPTIONS)
    assert sample == Sample(count=5, share=0.5, words=("x y", "z"), numbers=(1, 2), table={7: -1.5}, some_text="12")


def test_errors_name_the_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        build(Sample, parse("--count", "0", "--kind", "c", "--some-text", "x"), OPTIONS)
    lines = caught.value.message.splitlines()
    assert [line.split(":")[0] for line in lines] == ["--count", "--kind"]
    assert "(given: '0')" in lines[0]
    with pytest.raises(argparse.ArgumentError, match="not JSON"):
        parse("--table", "{")


def test_help_holds_description_and_default() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "sample", OPTIONS)
    text = " ".join(parser.format_help().split())
    assert "How many, 100 % sure. (default: 1)" in text
    assert "--on, --no-on" in text
    assert "--kind a|b" in text


@pytest.mark.parametrize(
    ("group", "model", "skip"),
    [
        ("engine", EngineConfig, {"model"}),
        ("model", ModelConfig, {"engine", "slo"}),
        ("ingress", IngressConfig, {"limits", "media"}),
        ("router", RouterConfig, set()),
    ],
)
def test_every_field_of_the_configuration_is_an_option(group: str, model: type[Frozen], skip: set[str]) -> None:
    assert set(model.model_fields) - skip <= {option.path[-1] for option in SERVE_OPTIONS[group]}


def test_no_two_options_share_a_flag_and_all_are_described() -> None:
    options: list[Option] = [option for group in SERVE_OPTIONS.values() for option in group]
    assert len({option.flag for option in options}) == len(options)
    assert [option.flag for option in options if not option.field.description] == []


def test_help_of_every_command(manta: Manta, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "chat", "generate", "run-batch", "bench", "config", "collect-env"):
        with pytest.raises(SystemExit) as left:
            manta(command, "--help")
        assert left.value.code == 0
        assert f"usage: manta {command}" in capsys.readouterr().out


def test_underscores_are_dashes(manta: Manta) -> None:
    assert "max_model_len: 77 " in manta("config", "--max_model_len=77").out
