"""The chat page in a real browser, over the real application with a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from app.errors import EngineDeadError
from app.records.adapter import AdapterAsk
from tests.api.pages.browser import ENTER, ESCAPE, NULL, SHIFT, TAB, Browser
from tests.limits import wait_until

DONE = "document.querySelectorAll('.answer:not([aria-busy])').length === arguments[0]"


class Page:
    """The page before a scripted engine that answers `text` (a new one: set `text` again)."""

    def __init__(self, browser: Browser, client: Any, server: Any) -> None:
        self.browser = browser
        self.client = client
        self.server = server
        self.model = client.models["m"]
        self.client.step = 4
        self.open()

    def open(self) -> None:
        self.browser.open(self.server.url)
        self.browser.wait_for("document.querySelector('#model').value === 'm'")

    def answers(self, text: str) -> None:
        self.client.script = lambda request: self.model.tokenizer.encode(text)

    def ask(self, text: str, answer_number: int = 1) -> None:
        self.browser.type("#prompt", text + ENTER)
        self.browser.wait_for(DONE, answer_number)

    def prompt(self) -> str:
        decoded: str = self.model.tokenizer.decode(self.client.requests[-1].prompt_token_ids, False)
        return decoded


@pytest.fixture
def page(browser: Browser, client: Any, server: Any) -> Page:
    return Page(browser, client, server)


def test_conversation_with_figures(page: Page, browser: Browser) -> None:
    page.answers("Hello **you**.")
    page.client.delay_s = 0.02  # tokens that all come at once have no rate
    page.ask("Hi!")
    assert browser.texts(".user") == ["Hi!"]
    assert browser.texts(".answer .text") == ["Hello you."]
    assert browser.texts(".answer strong") == ["you"]
    (figures,) = browser.texts(".figures")
    request = page.client.requests[-1]
    for figure in ("TTFT", "tokens/s", f"prompt {len(request.prompt_token_ids)}", "cached", "replica replica-7"):
        assert figure in figures
    page.answers("Again.")
    page.ask("More", 2)
    assert "Hi!" in page.prompt()
    assert "Hello **you**." in page.prompt(), "the model sees what it wrote, not what is drawn"
    assert browser.texts(".answer .text") == ["Hello you.", "Again."]
    assert browser.complaints() == []


def test_conversation_survives_a_reload_and_clear_forgets_it(page: Page, browser: Browser) -> None:
    page.answers("Kept.")
    page.ask("Keep this")
    browser.type("[name=system]", "Be brief.")
    page.open()
    assert browser.texts(".message .text") == ["Kept."]
    assert "replica-7" in browser.texts(".figures")[0]
    page.ask("Next", 2)
    assert "Be brief." in page.prompt()
    assert "Keep this" in page.prompt()
    browser.click("#clear")
    assert browser.texts(".message") == []
    page.open()
    assert browser.texts(".message") == []


def test_settings_reach_the_engine(page: Page, browser: Browser) -> None:
    page.answers("x " * 50)
    for name, value in {"temperature": "0.25", "top_p": "0.5", "max_tokens": "7", "seed": "11"}.items():
        browser.type(f"[name={name}]", value)
    page.ask("Go")
    params = page.client.requests[-1].sampling
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.25, 0.5, 7, 11)
    assert "cut at the token limit" in browser.texts(".figures")[0]


def test_a_setting_out_of_range_is_said_and_not_sent(page: Page, browser: Browser) -> None:
    browser.type("[name=temperature]", "9")
    page.ask("Go")
    assert "temperature" in browser.texts(".error p")[0]
    assert page.client.requests == []


def test_stop_by_key_and_by_button(page: Page, browser: Browser) -> None:
    page.answers("word " * 400)
    page.client.delay_s = 0.02
    for number, stop in enumerate((lambda: browser.press(ESCAPE), lambda: browser.click("#stop")), 1):
        browser.type("#prompt", "Go on and on" + ENTER)
        browser.wait_for("document.querySelector('.answer:last-child .text').innerText.length > 20")
        stop()
        browser.wait_for(DONE, number)
        wait_until(lambda: page.client.num_running == 0)
        assert page.client.num_aborted == number, "the engine does not go on for nobody"
        assert "stopped" in browser.texts(".figures")[-1]
        assert "tokens" in browser.texts(".figures")[-1]
        assert browser.run("return document.querySelector('#stop').hidden")
        assert browser.focus() == "prompt"


def test_clear_while_an_answer_runs(page: Page, browser: Browser) -> None:
    page.answers("word " * 400)
    page.client.delay_s = 0.02
    browser.type("#prompt", "Go" + ENTER)
    browser.wait_for("document.querySelector('.answer .text')?.innerText.length > 20")
    browser.click("#clear")
    wait_until(lambda: page.client.num_running == 0)
    page.client.delay_s = 0.0
    page.answers("Fresh.")
    page.ask("Again")
    assert browser.texts(".message .text") == ["Fresh."]
    assert "Go" not in page.prompt()


@pytest.mark.parametrize(
    ("thinking", "written", "reasoning", "text"),
    [
        ("", "<think>\nHm, *so*.\n</think>\n\nYes.", "Hm, so.", "Yes."),
        ("on", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),  # the prompt opened the reasoning
        ("on", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("on", "Plain, from a model that does not think.", "", "Plain, from a model that does not think."),
        ("off", "Plain.", "", "Plain."),
        ("", "a < b and </div> stay", "", "a < b and </div> stay"),
    ],
)
def test_reasoning_is_shown_apart(
    page: Page, browser: Browser, thinking: str, written: str, reasoning: str, text: str
) -> None:
    browser.run("document.querySelector('[name=thinking]').value = arguments[0]", thinking)
    page.answers(written)
    page.ask("Well?")
    browser.run("document.querySelector('.reasoning').open = true")
    assert browser.texts(".answer .text") == [text]
    assert browser.run("return document.querySelector('.reasoning').hidden") == (not reasoning)
    if reasoning:
        assert browser.texts(".reasoning > div") == [reasoning]


def test_tool_call_and_its_result(page: Page, browser: Browser) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    browser.run("document.querySelector('[name=tools]').value = arguments[0]", json.dumps([tool]))
    page.answers('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>')
    page.ask("1 + 2?")
    assert browser.texts(".answer .text") == ["Let me see."]
    assert browser.texts(".call h3") == ["Tool call add"]
    assert json.loads(browser.texts(".call pre")[0]) == {"a": 1, "b": 2}
    page.answers("It is 3.")
    browser.type(".call textarea", "3")
    browser.click(".call button")
    browser.wait_for(DONE, 2)
    assert browser.texts(".result pre") == ["3"]
    assert browser.texts(".answer .text")[-1] == "It is 3."
    assert "<|im_start|>tool\n3" in page.prompt()
    assert '"name": "add"' in page.prompt()


def test_what_a_model_writes_is_never_html(page: Page, browser: Browser) -> None:
    evil = (
        "<img src=x onerror=document.title='pwned'> <script>document.title='pwned'</script>\n\n"
        "[a](javascript:document.title='pwned') [b](data:text/html,x) [c](https://example.org/) [d](/status)\n\n"
        "```html\n<b>x</b>\n```\n"
    )
    page.answers(evil)
    page.ask("<b>me</b>")
    assert (
        browser.run("return document.querySelectorAll('#conversation :is(img, script, b:not(.figures b))').length") == 0
    )
    assert browser.run("return [...document.querySelectorAll('#conversation a')].map((a) => a.href)") == [
        "https://example.org/"
    ]
    assert browser.texts(".user") == ["<b>me</b>"]
    assert browser.texts(".code pre") == ["<b>x</b>"]
    assert browser.run("return document.title") == "Manta"
    with pytest.raises(RuntimeError, match="TrustedHTML"):
        browser.run("document.body.innerHTML = '<b>x</b>'")


def test_refusal_with_its_reason_and_another_try(page: Page, browser: Browser) -> None:
    browser.run("document.querySelector('[name=tools]').value = '[{\"type\": \"x\"}]'")
    page.ask("Go")
    (error,) = browser.texts(".error p")
    assert "(400)" in error
    assert "tools.0" in error
    browser.run("document.querySelector('[name=tools]').value = ''")
    page.answers("Now it works.")
    browser.click(".error button")
    browser.wait_for_text(".answer .text", "Now it works.")
    assert browser.texts(".user") == ["Go"]
    assert browser.texts(".error") == []


def test_api_key(browser: Browser, client: Any, make_server: Callable[[Any], Any], guarded: Any) -> None:
    browser.open(make_server(guarded).url)
    browser.wait_for_text(".key-form p", "This server wants an API key.")
    assert browser.focus() == "key"
    browser.type("#prompt", "Hi" + ENTER)
    browser.wait_for_text(".error p", "The server refused the API key (401): no API key")
    browser.type(".key-form input", "wrong-key" + ENTER)
    browser.wait_for_text(".key-form p", "This API key is not accepted by the server: wrong API key.")
    assert client.requests == []
    browser.type(".key-form input", "right-key" + ENTER)
    browser.wait_for("document.querySelectorAll('.figures').length === 1")  # the question is asked again by itself
    assert (browser.texts(".notice"), browser.texts(".error"), browser.texts(".user")) == ([], [], ["Hi"])
    assert browser.run("return document.querySelector('#model').value") == "m"
    assert len(client.requests) == 1
    assert "right-key" not in browser.run("return JSON.stringify(localStorage)"), "a key does not outlive its tab"
    browser.call("POST", "/refresh", {})
    browser.wait_for("document.querySelector('#model').value === 'm'")
    assert browser.texts(".key-form") == []


def test_an_adapter_is_picked(
    browser: Browser, make_server: Callable[[Any], Any], application: Any, client: Any
) -> None:
    client.models["pirate"] = client.models["m"].adapted(AdapterAsk("pirate", b"0" * 16), "/pirate")
    browser.open(make_server(application).url)
    browser.wait_for("document.querySelector('#model').options.length === 3")
    labels = "return [...document.querySelector('#model').options].map((option) => option.label)"
    assert browser.run(labels) == ["m", "alias", "pirate (adapter of m)"]
    browser.run("document.querySelector('#model').value = 'pirate'")
    browser.type("#prompt", "Hi" + ENTER)
    browser.wait_for("document.querySelectorAll('.figures').length === 1")
    (request,) = client.requests
    assert request.asked(AdapterAsk).name == "pirate"


def test_api_key_in_the_settings(browser: Browser, make_server: Callable[[Any], Any], guarded: Any) -> None:
    browser.open(make_server(guarded).url)
    browser.wait_for_text(".key-form p", "wants an API key")
    browser.type("#api-key", "right-key" + TAB)
    browser.wait_for("document.querySelector('#model').value === 'm'")
    assert browser.texts(".notice") == []


async def _cut(scope: Any, receive: Any, send: Any) -> None:
    """A proxy that loses its server: 200, half a stream, the end."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    chunk = {"choices": [{"index": 0, "delta": {"content": "Half an"}, "finish_reason": None}]}
    await send({"type": "http.response.body", "body": f"data: {json.dumps(chunk)}\n\n".encode()})


def test_a_stream_that_just_ends_is_an_error(
    browser: Browser, make_server: Callable[[Any], Any], application: Any
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (_cut if scope["path"] == "/v1/chat/completions" else application)(scope, receive, send)

    browser.open(make_server(app).url)
    browser.type("#prompt", "Hi" + ENTER)
    browser.wait_for_text(".error p", "The connection ended before the answer was complete.")
    assert browser.texts(".answer .text") == ["Half an"]


def test_error_within_a_stream_keeps_what_came(page: Page, browser: Browser) -> None:
    page.answers("One two three four five six")
    page.client.fail_after = (2, EngineDeadError("the replica is gone"))
    page.ask("Go")
    assert browser.texts(".error p") == ["The answer broke off: the replica is gone"]
    assert browser.texts(".answer .text")[0].startswith("One")


def test_dead_server(page: Page, browser: Browser) -> None:
    page.server.__exit__(None, None, None)
    page.ask("Anybody?")
    assert browser.texts(".error p") == [f"No answer from {page.server.url}. Is the server running?"]
    assert browser.texts(".user") == ["Anybody?"]
    assert browser.run("return document.querySelectorAll('.waiting, [aria-busy]').length") == 0


def test_keyboard_alone(page: Page, browser: Browser) -> None:
    assert browser.focus() == "prompt"
    browser.type("#prompt", f"one{SHIFT}{ENTER}{NULL}two")
    assert browser.run("return document.querySelector('#prompt').value") == "one\ntwo"
    assert page.client.requests == []
    browser.press(TAB)
    assert browser.focus() == "send"
    page.answers("Done.")
    browser.press(ENTER)
    browser.wait_for(DONE, 1)
    assert browser.texts("#announce") == ["Answer complete."]
    browser.run("document.activeElement.blur()")
    reached = []
    for _ in range(18):
        browser.press(TAB)
        reached.append(browser.focus())
    for name in ("theme", "model", "system", "temperature", "top_p", "max_tokens", "seed", "thinking"):
        assert name in reached
    assert [name for name in reached if name in ("theme", "model", "seed")] == ["theme", "model", "seed"]


def test_every_control_has_a_name(page: Page, browser: Browser) -> None:
    nameless = """return [...document.querySelectorAll('input, select, textarea, button')]
      .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map((e) => e.outerHTML)"""
    assert browser.run(nameless) == []


def test_theme_follows_the_system_until_chosen(page: Page, browser: Browser) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(f"return {back}")
    browser.prefer("dark")
    dark = browser.run(f"return {back}")
    assert light != dark
    browser.click("#theme")
    assert browser.run(f"return {back}") == light
    page.open()
    assert browser.run(f"return {back}") == light


def test_a_narrow_window_needs_no_sideways_scrolling(page: Page, browser: Browser) -> None:
    browser.resize(360, 740)
    page.answers(
        "A " + "verylongword" * 20 + "\n\n```\n" + "wide " * 60 + "\n```\n\n| a | b |\n|-|-|\n| 1 | " + "x" * 90
    )
    page.ask("Go")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("return document.querySelector('#conversation').scrollWidth <= innerWidth")
    browser.click("#settings-toggle")
    assert browser.focus() == "model"
