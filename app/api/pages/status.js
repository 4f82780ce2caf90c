// The status page: reads /metrics and /health again and again, and draws what it finds.

import { KeyForm, authorization } from "./key.js";
import { element } from "./markdown.js";
import { Reading, quantile, rate, share } from "./metrics.js";
import { installTheme } from "./theme.js";

const PERIOD_MS = 1500;
const TIMEOUT_MS = 8000;
const WINDOW_S = 10; // of rates and percentiles
const HISTORY = 80; // readings a sparkline shows: two minutes
const SVG = "http://www.w3.org/2000/svg";

const HITS = ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"];
const OUTPUT = "vllm:generation_tokens_total";
const PROMPT = "vllm:prompt_tokens_total";

const $ = (id) => document.getElementById(id);
const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
const seconds = (value) => (value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`);

// One line a tile: title, how to get its value from the last reading and one of WINDOW_S ago, how to write it, top.
const TILES = [
  ["Output tokens/s", (now, before) => rate(OUTPUT, now, before), whole],
  ["Prompt tokens/s", (now, before) => rate(PROMPT, now, before), whole],
  ["Requests running", (now) => now.sum("vllm:num_requests_running"), whole],
  ["Requests waiting", (now) => now.sum("vllm:num_requests_waiting"), whole],
  ["KV cache in use", (now) => now.mean("vllm:kv_cache_usage_perc"), percent, 1],
  ["Prefix cache hits", (now, before) => share(...HITS, now, before), percent, 1],
  ["TTFT, median", (now, before) => quantile("vllm:time_to_first_token_seconds", 0.5, now, before), seconds],
  ["TTFT, 95th percentile", (now, before) => quantile("vllm:time_to_first_token_seconds", 0.95, now, before), seconds],
  ["Between tokens, median", (now, before) => quantile("vllm:inter_token_latency_seconds", 0.5, now, before), seconds],
  ["Requests finished/s", (now, before) => rate("vllm:request_success_total", now, before), (value) => value.toFixed(1)],
];

class Tile {
  constructor([title, compute, write, top]) {
    this.compute = compute;
    this.write = write;
    this.top = top;
    this.values = [];
    this.figure = element("p", "–");
    this.figure.className = "figure";
    this.line = document.createElementNS(SVG, "path");
    this.area = document.createElementNS(SVG, "path");
    this.area.setAttribute("class", "area");
    const plot = document.createElementNS(SVG, "svg");
    plot.setAttribute("viewBox", "0 0 100 28");
    plot.setAttribute("preserveAspectRatio", "none");
    plot.setAttribute("aria-hidden", "true");
    plot.append(this.area, this.line);
    this.node = element("section", element("h3", title), this.figure, plot);
  }

  push(now, before) {
    const value = this.compute(now, before);
    this.values.push(value);
    if (this.values.length > HISTORY) this.values.shift();
    this.figure.textContent = value === null ? "–" : this.write(value);
    this.draw();
  }

  draw() {
    const top = this.top ?? Math.max(1e-9, ...this.values.map((value) => value ?? 0));
    const step = 100 / (HISTORY - 1);
    const start = 100 - (this.values.length - 1) * step; // the newest reading stands at the right edge
    let path = "";
    let area = "";
    let open = false;
    this.values.forEach((value, i) => {
      if (value === null) {
        open = false;
        return;
      }
      const x = (start + i * step).toFixed(2);
      const y = (26 - 24 * Math.min(1, value / top)).toFixed(2);
      path += `${open ? "L" : "M"}${x} ${y}`;
      if (open) area += `L${x} ${y}V28`;
      area += `M${x} 28V${y}`;
      open = true;
    });
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", area);
  }
}

const tiles = TILES.map((row) => new Tile(row));
const readings = []; // of the last WINDOW_S seconds
let paused = false;

function cell(content, className) {
  const made = element("td", content);
  if (className) made.className = className;
  return made;
}

function usageBar(reading, replica) {
  const used = reading.sum("vllm:kv_cache_usage_perc", replica);
  const bar = element("meter");
  bar.max = 1;
  bar.value = used;
  const shape = reading.samples("vllm:cache_config_info", replica)[0]?.labels;
  const tokens = shape ? shape.num_gpu_blocks * shape.block_size : 0;
  const text = tokens ? `${percent(used)} of ${whole(tokens)} tokens` : percent(used);
  return element("span", bar, ` ${text}`);
}

function replicaRow(now, before, replica) {
  const of = (name) => now.sum(name, replica);
  const queries = of(HITS[1]);
  return element("tr",
    cell(replica.model_name), cell(replica.engine, "right"),
    cell(whole(of("vllm:num_requests_running")), "right"), cell(whole(of("vllm:num_requests_waiting")), "right"),
    cell(usageBar(now, replica)), cell(queries ? percent(of(HITS[0]) / queries) : "–", "right"),
    cell(whole(rate(OUTPUT, now, before, replica) ?? 0), "right"),
    cell(whole(rate(PROMPT, now, before, replica) ?? 0), "right"),
    cell(whole(of("vllm:num_preemptions_total")), "right"));
}

function draw(now, before) {
  for (const tile of tiles) tile.push(now, before);
  const rows = now.replicas.map((replica) => replicaRow(now, before, replica));
  $("replicas").replaceChildren(...rows);
}

function say(className, text) {
  const health = $("health");
  health.className = `health ${className}`;
  if (health.textContent !== text) health.textContent = text; // screen readers repeat what changes
}

async function get(path) {
  return fetch(path, { headers: authorization(), cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
}

const keyForm = new KeyForm(() => {
  keyForm.node.remove();
  turn();
});

function askForKey() {
  say("bad", "The figures need an API key.");
  if (keyForm.node.isConnected) return; // somebody may be typing
  keyForm.explain();
  $("health").after(keyForm.node);
  keyForm.field.focus();
}

async function read() {
  const [metrics, health] = await Promise.all([get("metrics"), get("health")]);
  if (metrics.status === 401) return askForKey();
  if (!metrics.ok) return say("bad", `/metrics answers with status ${metrics.status}.`);
  keyForm.node.remove();
  const now = new Reading(await metrics.text(), performance.now() / 1000);
  readings.push(now);
  while (readings.length > 2 && now.timeS - readings[1].timeS >= WINDOW_S) readings.shift();
  draw(now, readings[0]);
  const count = now.replicas.length;
  const replicas = `${count} replica${count === 1 ? "" : "s"}`;
  if (health.ok) say("good", `Healthy: ${replicas}.`);
  else say("bad", `A model has no replica that can make progress (${replicas} answering).`);
}

let lastAnswer = null;

async function turn() {
  try {
    await read();
    lastAnswer = new Date();
  } catch {
    const since = lastAnswer ? ` since ${lastAnswer.toLocaleTimeString()}` : "";
    say("bad", `No answer from ${location.origin}${since}. What stands below is old.`);
  }
}

async function poll() {
  if (!paused && !document.hidden) await turn();
  setTimeout(poll, PERIOD_MS);
}

$("tiles").append(...tiles.map((tile) => tile.node));
$("pause").addEventListener("click", (event) => {
  paused = !paused;
  event.currentTarget.setAttribute("aria-pressed", String(paused));
  event.currentTarget.textContent = paused ? "Go on" : "Pause";
});
installTheme($("theme"));
poll();
