// What a program with OpenAI's own client does, unchanged; prints what came as one JSON object.

import fs from "node:fs";
import OpenAI from "openai";

const { BASE_URL, SOUND } = process.env;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0 });
const { transcriptions, translations } = client.audio;
const asked = () => ({ file: fs.createReadStream(SOUND), model: "whisper" });
const found = {};

found.json = await transcriptions.create(asked());
found.text = await transcriptions.create({ ...asked(), response_format: "text" });
found.srt = await transcriptions.create({ ...asked(), response_format: "srt" });
found.verbose = await transcriptions.create({
  ...asked(),
  response_format: "verbose_json",
  timestamp_granularities: ["word", "segment"],
});
found.translation = await translations.create(asked());
found.events = [];
for await (const event of await transcriptions.create({ ...asked(), stream: true, include: ["logprobs"] })) {
  found.events.push(event);
}
try {
  await transcriptions.create({ ...asked(), language: "tlhingan" });
} catch (error) {
  found.error = { kind: error.constructor.name, status: error.status, param: error.param, message: error.message };
}
console.log(JSON.stringify(found));
