// The chat page: settings, conversation (kept in localStorage), one request at a time.

import { Answer } from "./answer.js";
import { KeyForm, apiKey, keepKey } from "./key.js";
import { element } from "./markdown.js";
import { Pictures, filesOf, isPicture } from "./pictures.js";
import { Sounds, isSound, soundPart } from "./sounds.js";
import { ChatError, listModels, streamChat } from "./stream.js";
import { installTheme } from "./theme.js";
import { AnswerView, ToolResultView, UserView, copy } from "./view.js";

const CONVERSATION = "manta.conversation";
const SETTINGS = "manta.settings";

const $ = (id) => document.getElementById(id);
const options = $("options");
const log = $("conversation");
const prompt = $("prompt");

let messages = load(CONVERSATION, []);
if (!Array.isArray(messages)) messages = [];
let running = null; // AbortController of the request under way
let refused = false; // the last question was, for want of a key

function load(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function save(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // storage is full or forbidden: the page works on, it only forgets
  }
}

// --- settings ---------------------------------------------------------------------------------------------------

function field(name) {
  return options.elements[name].value.trim();
}

function restoreSettings() {
  for (const [name, value] of Object.entries(load(SETTINGS, {}))) {
    if (options.elements[name]) options.elements[name].value = value;
  }
  $("api-key").value = apiKey();
}

function saveSettings() {
  const { apiKey: key, ...rest } = Object.fromEntries(new FormData(options));
  save(SETTINGS, rest);
  keepKey(key);
}

function sampling() {
  const made = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const input = options.elements[name];
    if (!input.validity.valid) throw new ChatError(`${name}: ${input.validationMessage}`);
    if (input.value !== "") made[name] = Number(input.value);
  }
  const thinking = field("thinking");
  if (thinking) made.chat_template_kwargs = { enable_thinking: thinking === "on" };
  return made;
}

function tools() {
  if (!field("tools")) return {};
  try {
    const list = JSON.parse(field("tools"));
    if (Array.isArray(list)) return list.length ? { tools: list } : {};
  } catch {
    // said below
  }
  throw new ChatError("Tools: this is not a JSON list.");
}

async function fillModels() {
  const picker = $("model");
  const wanted = picker.value || load(SETTINGS, {}).model;
  try {
    const models = await listModels();
    const label = (model) => (model.parent ? `${model.id} (adapter of ${model.parent})` : model.id);
    picker.replaceChildren(...models.map((model) => new Option(label(model), model.id, false, model.id === wanted)));
    log.querySelector(".notice")?.remove();
    sounds.offer(models, picker.value);
    if (refused) retry();
  } catch (error) {
    if (error.status === 401) askForKey(error.said);
    else notice(error.message);
  }
}

const pictures = new Pictures($("pictures"), notice);
const sounds = new Sounds($("record"), $("sounds"), { onProblem: notice, onText: write });

function write(text) {
  prompt.value = [prompt.value.trim(), text.trim()].filter(Boolean).join(" ");
  fitPrompt();
  prompt.focus();
}

const keyForm = new KeyForm(() => {
  $("api-key").value = apiKey();
  fillModels();
});

function askForKey(said) {
  log.querySelector(".notice")?.remove();
  keyForm.explain(said);
  log.append(keyForm.node);
  scrollDown(true);
  keyForm.field.focus();
}

// --- conversation -----------------------------------------------------------------------------------------------

function apiMessages() {
  const system = field("system");
  const made = system ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role !== "assistant") {
      const { name, pictures: shown = [], sounds: heard = [], ...rest } = message;
      made.push(shown.length || heard.length ? { ...rest, content: parts(rest.content, shown, heard) } : rest);
    } else if (message.content || message.calls.length) {
      made.push(assistantMessage(message));
    }
  }
  return made;
}

function parts(text, shown, heard) {
  const made = shown.filter(isPicture).map((url) => ({ type: "image_url", image_url: { url } }));
  made.push(...heard.filter(isSound).map(soundPart));
  return text ? [...made, { type: "text", text }] : made;
}

function assistantMessage({ content, reasoning, calls }) {
  const made = { role: "assistant", content };
  if (reasoning) made.reasoning_content = reasoning;
  if (calls.length) {
    made.tool_calls = calls.map(({ id, name, arguments: args }) => ({ id, type: "function", function: { name, arguments: args } }));
  }
  return made;
}

function draw() {
  log.replaceChildren();
  for (const message of messages) drawMessage(message);
  if (!messages.length) drawWelcome();
  scrollDown(true);
}

function drawMessage(message) {
  log.querySelector(".welcome")?.remove();
  if (message.role === "user") log.append(new UserView(message).node);
  else if (message.role === "tool") log.append(new ToolResultView(message).node);
  else newAnswerView().finish(message);
}

function newAnswerView() {
  const view = new AnswerView({ onResult: giveResult, onRetry: retry });
  log.append(view.node);
  return view;
}

function drawWelcome() {
  const made = element("div", element("p", "Ask something to begin."));
  made.className = "welcome";
  for (const text of ["Hello! What are you?", "What is 17 + 25?", "Count from 1 to 20."]) {
    const button = element("button", text);
    button.type = "button";
    button.addEventListener("click", () => say(text));
    made.append(button);
  }
  log.append(made);
}

function notice(text) {
  log.querySelector(".notice")?.remove();
  const made = element("p", text);
  made.className = "notice";
  made.setAttribute("role", "alert");
  log.append(made);
  scrollDown(true);
}

const atBottom = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;

function scrollDown(force) {
  if (force || atBottom()) log.scrollTop = log.scrollHeight;
}

// --- one request ------------------------------------------------------------------------------------------------

function say(text) {
  if (running || !(text.trim() || pictures.urls.length || sounds.urls.length)) return;
  const shown = pictures.take();
  const heard = sounds.take();
  const media = { ...(shown.length && { pictures: shown }), ...(heard.length && { sounds: heard }) };
  messages.push({ role: "user", content: text.trim(), ...media });
  drawMessage(messages.at(-1));
  prompt.value = "";
  fitPrompt();
  ask();
}

function giveResult(call, content) {
  call.answered = true;
  messages.push({ role: "tool", tool_call_id: call.id, name: call.name, content });
  drawMessage(messages.at(-1));
  save(CONVERSATION, messages);
  const last = messages.findLast((message) => message.role === "assistant");
  if (last.calls.every((other) => other.answered)) ask();
}

function retry() {
  if (running) return;
  while (messages.at(-1)?.role === "assistant") messages.pop();
  draw();
  if (messages.length) ask();
}

async function ask() {
  refused = false;
  const conversation = messages; // "Clear" puts another one in its place
  const view = newAnswerView();
  view.node.setAttribute("aria-busy", "true");
  const answer = new Answer(field("thinking") === "on");
  setRunning(new AbortController());
  view.update(answer.parts);
  scrollDown(true);
  save(CONVERSATION, messages);
  let said = "";
  try {
    await streamInto(answer, view);
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error instanceof ChatError ? error.message : `The page failed: ${error.message}`;
    refused = error.status === 401;
    said = error.said;
  }
  setRunning(null);
  if (messages !== conversation) return;
  answer.ended = true;
  messages.push(answer.message);
  save(CONVERSATION, messages);
  const follow = atBottom();
  view.finish(answer.message);
  scrollDown(follow);
  if (refused) askForKey(said);
  $("announce").textContent = answer.error ? "" : answer.finish === "stopped" ? "Stopped." : "Answer complete.";
}

async function streamInto(answer, view) {
  const body = {
    model: field("model") || undefined,
    messages: apiMessages(),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true }, // so that a stopped answer has figures too
    ...sampling(),
    ...tools(),
  };
  let drawing = 0;
  const redraw = () => {
    drawing = 0;
    const follow = atBottom();
    view.update(answer.parts);
    scrollDown(follow);
  };
  try {
    await streamChat(body, {
      signal: running.signal,
      onHead: ({ replica }) => (answer.replica = replica),
      onChunk: (chunk) => {
        answer.add(chunk);
        drawing ||= setTimeout(redraw, answer.written.length < 20000 ? 30 : 300);
      },
    });
  } finally {
    clearTimeout(drawing);
  }
}

function setRunning(controller) {
  running = controller;
  const hadFocus = [$("send"), $("stop")].includes(document.activeElement);
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  if (hadFocus || document.activeElement === document.body) prompt.focus();
}

// --- wiring -----------------------------------------------------------------------------------------------------

function fitPrompt() {
  prompt.rows = Math.min(10, Math.max(1, prompt.value.split("\n").length));
}

function asText() {
  const words = { user: "You", assistant: "Answer", tool: "Tool" };
  return messages.map(({ role, content }) => `${words[role]}:\n${content}`).join("\n\n");
}

function wire() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    say(prompt.value);
  });
  prompt.addEventListener("input", fitPrompt);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    say(prompt.value);
  });
  $("choose").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", (event) => {
    pictures.add([...event.target.files]);
    event.target.value = "";
    prompt.focus();
  });
  prompt.addEventListener("paste", (event) => {
    if (filesOf(event.clipboardData).length) event.preventDefault();
    pictures.add(filesOf(event.clipboardData));
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    pictures.add(filesOf(event.dataTransfer));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    save(CONVERSATION, messages);
    draw();
    prompt.focus();
  });
  $("copy-all").addEventListener("click", (event) => copy(asText(), event.currentTarget));
  $("settings-toggle").addEventListener("click", (event) => {
    const open = document.body.classList.toggle("settings-open");
    event.currentTarget.setAttribute("aria-expanded", String(open));
    if (open) $("model").focus();
  });
  options.addEventListener("submit", (event) => event.preventDefault());
  options.addEventListener("input", saveSettings);
  $("api-key").addEventListener("change", fillModels);
  $("model").addEventListener("change", (event) => sounds.choose(event.target.value));
  log.addEventListener("click", (event) => {
    const button = event.target.closest(".copy-code");
    if (button) copy(button.closest(".code").querySelector("pre").textContent, button);
  });
}

installTheme($("theme"));
restoreSettings();
wire();
draw();
fillModels();
prompt.focus();
