"""Templates of unknown origin: what they may cost, and that they render like any other."""

from __future__ import annotations

import pytest

from app.errors import InvalidRequestError
from app.text.template_sandbox import render_untrusted

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
