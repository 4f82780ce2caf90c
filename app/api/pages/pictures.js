// Pictures that go with the next message: chosen, dropped or pasted; shown small until they are sent.

import { Attachments, read } from "./attachments.js";
import { element } from "./markdown.js";

const MAX_BYTES = 20 * 1024 * 1024; // the server's own limit, unless it is told otherwise
const KINDS = /^image\/(png|jpeg|webp|gif)$/;

export const isPicture = (url) => /^data:image\/(png|jpeg|webp|gif);base64,/.test(url);

// An image node of a data URL; anything else is not shown.
export function pictureNode(url) {
  const made = element("img");
  made.alt = "Picture";
  made.className = "picture";
  if (isPicture(url)) made.src = url;
  return made;
}

export class Pictures extends Attachments {
  constructor(row, onProblem) {
    super(row);
    this.onProblem = onProblem;
  }

  async add(files) {
    for (const file of files) {
      if (!KINDS.test(file.type)) this.onProblem(`${file.name}: only PNG, JPEG, WebP and GIF pictures can be sent.`);
      else if (file.size > MAX_BYTES) this.onProblem(`${file.name}: a picture may have ${MAX_BYTES >> 20} MiB.`);
      else this.urls.push(await read(file));
    }
    this.draw();
  }

  entry(url, i) {
    return this.remover("picture", i, pictureNode(url));
  }
}

// Files of a drop or a paste.
export const filesOf = (transfer) => [...(transfer?.files ?? [])];
