// The server's chat endpoint: one streamed request, and every way it can fail as one readable message.

import { authorization } from "./key.js";

export class ChatError extends Error {
  // `status` and `said` (the server's own words) of an answer that refused.
  constructor(message, { status = 0, said = "" } = {}) {
    super(message);
    Object.assign(this, { status, said });
  }
}

const headers = () => ({ "Content-Type": "application/json", ...authorization() });

export async function readError(response) {
  let said = "";
  try {
    const body = await response.json();
    said = body.error?.message ?? body.detail ?? body.message ?? "";
  } catch {
    // not JSON: a proxy answered; its status says what there is to say
  }
  const why = {
    401: "The server refused the API key",
    403: "This API key may not do that",
    404: "The server does not know this",
    413: "The conversation is too large to send",
    429: "The server has too many requests at the moment",
    502: "The server is starting or has gone away",
    503: "The server cannot answer at the moment",
    504: "The server took too long",
  }[response.status] ?? (response.status < 500 ? "The server refused the request" : "The server failed");
  return new ChatError(`${why} (${response.status})${said ? `: ${said}` : "."}`, { status: response.status, said });
}

export async function request(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ChatError(`No answer from ${location.origin}. Is the server running?`);
  }
}

// The JSON objects of a stream of server-sent events. A stream must end with [DONE]: anything else was cut off.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ChatError("The connection was lost before the answer was complete.");
    }
    if (part.done) throw new ChatError("The connection ended before the answer was complete.");
    const lines = (held + part.value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Runs one chat request. `onChunk` gets each chunk; the returned head tells which replica answers.
export async function streamChat(body, { signal, onHead, onChunk }) {
  const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await request("v1/chat/completions", options);
  if (!response.ok) throw await readError(response);
  onHead({ replica: response.headers.get("x-manta-replica") });
  for await (const chunk of events(response)) {
    if (chunk.error) throw new ChatError(`The answer broke off: ${chunk.error.message ?? "unknown error"}`);
    onChunk(chunk);
  }
}

// What is said in a recording.
export async function transcribe(blob, model) {
  const form = new FormData();
  form.append("model", model);
  form.append("file", blob, "recording");
  const response = await request("v1/audio/transcriptions", { method: "POST", headers: authorization(), body: form });
  if (!response.ok) throw await readError(response);
  return (await response.json()).text;
}

export async function listModels() {
  const response = await request("v1/models", { headers: headers() });
  if (!response.ok) throw await readError(response);
  return (await response.json()).data;
}
