// A sound that was recorded: sent with the next message where the model hears, else written down for the prompt.

import { Attachments, read } from "./attachments.js";
import { element } from "./markdown.js";
import { transcribe } from "./stream.js";

const SOUND = /^data:audio\/(\w+)(?:;[\w=]+)*;base64,/;
const KINDS = ["audio/webm;codecs=opus", "audio/ogg;codecs=opus", "audio/mp4"]; // the first that the browser writes
const MAX_S = 600; // a recording that was forgotten ends by itself

export const isSound = (url) => SOUND.test(url);

// A part of a message's content, as the API has it.
export function soundPart(url) {
  const [head, format] = url.match(SOUND);
  return { type: "input_audio", input_audio: { data: url.slice(head.length), format } };
}

// A player of a data URL; anything else is not played.
export function soundNode(url) {
  const made = element("audio");
  made.controls = true;
  made.className = "sound";
  if (isSound(url)) made.src = url;
  return made;
}

export class Sounds extends Attachments {
  // `onText` gets what was said, where it was written down.
  constructor(button, row, { onProblem, onText }) {
    super(row);
    Object.assign(this, { button, onProblem, onText, recorder: null, models: [] });
    button.addEventListener("click", () => (this.recorder ? this.recorder.stop() : this.record()));
  }

  // What the server has, and which of it is chosen: whether recording is of use.
  offer(models, chosen) {
    const hears = (model) => model.input_modalities?.includes("audio");
    const own = models.find((model) => model.id === chosen);
    this.models = models;
    this.hears = Boolean(own && hears(own) && own.input_modalities.includes("text"));
    this.writer = [own, ...models].find((model) => model && hears(model) && !model.input_modalities.includes("text"));
    this.button.hidden = !navigator.mediaDevices || !(this.hears || this.writer);
  }

  choose(chosen) {
    this.offer(this.models, chosen);
  }

  async record() {
    this.button.disabled = true;
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      this.recorder = new MediaRecorder(stream, { mimeType: KINDS.find((kind) => MediaRecorder.isTypeSupported(kind)) });
    } catch (error) {
      this.onProblem(`The microphone cannot be used: ${error.message}`);
      return;
    } finally {
      this.button.disabled = false;
    }
    const pieces = [];
    const { recorder } = this;
    const end = setTimeout(() => recorder.stop(), MAX_S * 1000);
    recorder.addEventListener("dataavailable", (event) => pieces.push(event.data));
    recorder.addEventListener("stop", () => {
      clearTimeout(end);
      for (const track of recorder.stream.getTracks()) track.stop();
      this.recorder = null;
      this.show();
      this.use(new Blob(pieces, { type: recorder.mimeType }));
    });
    recorder.start();
    this.show();
  }

  show() {
    this.button.textContent = this.recorder ? "Stop recording" : "Record";
    this.button.setAttribute("aria-pressed", String(Boolean(this.recorder)));
  }

  async use(blob) {
    if (this.hears) {
      this.urls.push(await read(blob));
      this.draw();
      return;
    }
    this.button.disabled = true;
    this.button.textContent = "Writing it down";
    try {
      this.onText(await transcribe(blob, this.writer.id));
    } catch (error) {
      this.onProblem(error.message);
    }
    this.button.disabled = false;
    this.show();
  }

  entry(url, i) {
    return [soundNode(url), this.remover("sound", i, "Remove")];
  }
}
