"""Templates of unknown origin: what they may cost, and that they render like any other."""

from __future__ import annotations

import pytest

from app.errors import CheckpointError, InvalidRequestError
from app.text.chat_template import ChatTemplate
from app.text.template_sandbox import render_untrusted, takes_too_much

HI = [{"role": "user", "content": "hi"}]


def test_a_template_renders_in_its_process() -> None:
    options = {"messages": HI, "add_generation_prompt": True}
    source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert render_untrusted(source, {"bos_token": "<s>"}, options, max_s=5.0, max_chars=100) == "<s>hi>"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages", "does not parse"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
        ("{{ 'x' * 10**10 }}", "memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1 s"),
        ("{{ 7 ** (10 ** 9) }}", "1 s"),
        ("{% for i in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}", "exceeds 1000000 characters"),
    ],
)
def test_hostile_templates(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as error:
        render_untrusted(source, {}, {"messages": HI}, max_s=1.0, max_chars=1_000_000)
    assert error.value.param == "chat_template"


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "is_confined"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", False),
        ("{{ raise_exception('never') }}", False),
        ("", False),
        (LOOPS, True),
        ("{{ 'x' * 10**10 }}", True),
        ("{% if tools %}" + LOOPS + "{% endif %}", False),  # the template without tools is this one; see below
    ],
)
def test_a_models_template_is_confined_that_takes_too_much(source: str, is_confined: bool) -> None:
    assert takes_too_much({"default": source} if source else {}, {}) is is_confined


def test_the_template_for_tools_is_tried_too() -> None:
    templates = {"default": "x", "tool_use": LOOPS}
    assert takes_too_much(templates, {})
    template = ChatTemplate(templates, {}, is_confined=True)
    assert (template.source_for(has_tools=False), template.source_for(has_tools=True)) == ("x", LOOPS)


def test_a_confined_template_is_not_even_compiled_here() -> None:
    """Constants are computed while a template is compiled: this one would never come back."""
    ChatTemplate({"default": "{{ 7 ** (10 ** 10) }}"}, {}, is_confined=True)
    with pytest.raises(CheckpointError, match="does not parse"):
        ChatTemplate({"default": "{{ 7 **"}, {}, is_confined=True)
