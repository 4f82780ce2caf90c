// One answer as it grows: reasoning, text, tool calls, figures. Knows nothing of the page.

const OPEN = "<think>";
const CLOSE = "</think>";

// Splits what a model wrote into reasoning and text. `startsInside`: the prompt already opened the reasoning.
export function splitReasoning(written, startsInside, ended) {
  let rest = written.trimStart();
  const opened = rest.startsWith(OPEN);
  if (opened) rest = rest.slice(OPEN.length);
  const close = rest.indexOf(CLOSE);
  if (close >= 0 && (opened || startsInside || !rest.slice(0, close).includes(OPEN))) {
    return { reasoning: rest.slice(0, close).trim(), text: rest.slice(close + CLOSE.length).trimStart(), thinking: false };
  }
  if (opened || (startsInside && !ended)) return { reasoning: withoutPart(rest, CLOSE).trim(), text: "", thinking: !ended };
  return { reasoning: "", text: ended ? written : withoutPart(written, OPEN), thinking: false };
}

// Without an ending that may become a marker with the next chunk.
function withoutPart(text, marker) {
  for (let n = marker.length - 1; n > 0; n--) {
    if (text.endsWith(marker.slice(0, n))) return text.slice(0, -n);
  }
  return text;
}

export class Answer {
  constructor(startsInside) {
    this.startsInside = startsInside;
    this.written = "";
    this.reasoning = ""; // where the server has already told reasoning from text
    this.calls = [];
    this.finish = null;
    this.error = null;
    this.ended = false;
    this.replica = null;
    this.usage = null;
    this.sentAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
  }

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (reasoning || delta.content || delta.tool_calls) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
    }
    this.reasoning += reasoning;
    this.written += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) this.addCall(call);
    this.finish = choice.finish_reason ?? this.finish;
  }

  addCall(part) {
    const call = (this.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name = part.function?.name ?? call.name;
    call.arguments += part.function?.arguments ?? "";
  }

  get parts() {
    if (this.reasoning) return { reasoning: this.reasoning, text: this.written, thinking: !this.ended && !this.written };
    return splitReasoning(this.written, this.startsInside, this.ended);
  }

  // TTFT in seconds, tokens a second after the first, prompt tokens and how many of them were cached.
  get figures() {
    const tokens = this.usage?.completion_tokens;
    const span = (this.lastAt - this.firstAt) / 1000;
    return {
      ttft: this.firstAt === null ? null : (this.firstAt - this.sentAt) / 1000,
      tokens: tokens ?? null,
      rate: tokens > 1 && span > 0 ? (tokens - 1) / span : null,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      replica: this.replica,
      finish: this.finish,
    };
  }

  // As it is kept in the conversation.
  get message() {
    const { reasoning, text } = this.parts;
    return { role: "assistant", content: text, reasoning, calls: this.calls, figures: this.figures, error: this.error };
  }
}
