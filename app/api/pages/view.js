// Draws messages. All text arrives as text nodes or through renderMarkdown, which makes nothing else.

import { element, renderMarkdown } from "./markdown.js";
import { pictureNode } from "./pictures.js";
import { soundNode } from "./sounds.js";

const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);

const ENDS = { length: "cut at the token limit", stopped: "stopped", tool_calls: "called a tool" };

function chip(label, value, title) {
  const made = element("span", element("b", label), ` ${value}`);
  made.title = title;
  return made;
}

function button(label, className, onClick) {
  const made = element("button", label);
  made.type = "button";
  made.className = className;
  made.addEventListener("click", onClick);
  return made;
}

export async function copy(text, made) {
  const label = made.textContent;
  try {
    await navigator.clipboard.writeText(text);
    made.textContent = "Copied";
  } catch {
    made.textContent = "The browser did not allow it"; // on plain http, other than localhost
  }
  setTimeout(() => (made.textContent = label), 1500);
}

// The figures under an answer.
export function figuresLine(figures) {
  const line = element("p");
  line.className = "figures";
  const add = (...parts) => line.append(chip(...parts));
  if (figures.ttft !== null) add("TTFT", seconds(figures.ttft), "Time to the first token, seen from this page");
  if (figures.rate !== null) add("tokens/s", figures.rate.toFixed(1), "After the first token");
  if (figures.tokens !== null) add("tokens", figures.tokens, "Tokens of this answer");
  if (figures.prompt !== null) add("prompt", figures.prompt, "Tokens of the prompt");
  if (figures.cached !== null) add("cached", figures.cached, "Prompt tokens found in the prefix cache");
  if (figures.replica) add("replica", figures.replica, "Engine replica that answered");
  if (ENDS[figures.finish]) line.append(element("em", ENDS[figures.finish]));
  return line;
}

export class UserView {
  constructor(message) {
    const media = [...(message.pictures ?? []).map(pictureNode), ...(message.sounds ?? []).map(soundNode)];
    this.node = element("article", ...media, renderMarkdown(message.content));
    this.node.className = "message user";
    this.node.setAttribute("aria-label", "You");
  }
}

export class ToolResultView {
  constructor(message) {
    const title = element("h3", "Result of ", element("code", message.name));
    this.node = element("article", title, element("pre", message.content));
    this.node.className = "message result";
  }
}

// An answer, drawn again whenever it has grown. The reasoning stays open or closed as the reader leaves it.
export class AnswerView {
  constructor({ onResult, onRetry }) {
    this.onResult = onResult;
    this.onRetry = onRetry;
    this.reasoning = element("details", element("summary", "Thinking"), element("div"));
    this.reasoning.className = "reasoning";
    this.reasoning.hidden = true;
    this.text = element("div");
    this.text.className = "text";
    this.calls = element("div");
    this.foot = element("footer");
    this.node = element("article", this.reasoning, this.text, this.calls, this.foot);
    this.node.className = "message answer";
    this.node.setAttribute("aria-label", "Answer");
  }

  update({ reasoning, text, thinking }) {
    this.node.classList.toggle("waiting", !reasoning && !text);
    this.reasoning.hidden = !reasoning && !thinking;
    this.reasoning.open ||= thinking && !this.reasoning.dataset.seen;
    if (thinking) this.reasoning.dataset.seen = "yes"; // opened once by itself, afterwards the reader decides
    this.reasoning.firstChild.textContent = thinking ? "Thinking…" : "Thought";
    this.reasoning.lastChild.replaceChildren(renderMarkdown(reasoning));
    this.text.replaceChildren(renderMarkdown(text));
  }

  finish(message) {
    this.update({ reasoning: message.reasoning, text: message.content, thinking: false });
    this.node.classList.remove("waiting");
    this.node.removeAttribute("aria-busy");
    this.reasoning.open = false;
    this.calls.replaceChildren(...message.calls.map((call) => this.callView(call)));
    this.foot.replaceChildren();
    if (message.error) this.foot.append(this.errorView(message.error));
    const line = figuresLine(message.figures);
    if (message.content) {
      const made = button("Copy", "quiet", () => copy(message.content, made));
      made.setAttribute("aria-label", "Copy this answer");
      line.append(made);
    }
    if (line.childNodes.length) this.foot.append(line);
  }

  errorView(text) {
    const box = element("div", element("p", text), button("Try again", "quiet", this.onRetry));
    box.className = "error";
    box.setAttribute("role", "alert");
    return box;
  }

  callView(call) {
    const title = element("h3", "Tool call ", element("code", call.name));
    const form = element("form", title, element("pre", pretty(call.arguments)));
    form.className = "call";
    if (call.answered) return form;
    const field = element("textarea");
    field.rows = 2;
    const label = element("label", "Result for the model", field);
    const send = element("button", "Give the result");
    form.append(label, send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      label.remove();
      send.remove();
      this.onResult(call, field.value);
    });
    return form;
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
