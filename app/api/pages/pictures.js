// Pictures that go with the next message: chosen, dropped or pasted; shown small until they are sent.

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

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

export class Pictures {
  constructor(row, onProblem) {
    this.row = row;
    this.onProblem = onProblem;
    this.urls = [];
  }

  async add(files) {
    for (const file of files) {
      if (!KINDS.test(file.type)) this.onProblem(`${file.name}: only PNG, JPEG, WebP and GIF pictures can be sent.`);
      else if (file.size > MAX_BYTES) this.onProblem(`${file.name}: a picture may have ${MAX_BYTES >> 20} MiB.`);
      else this.urls.push(await read(file));
    }
    this.draw();
  }

  take() {
    const taken = this.urls;
    this.urls = [];
    this.draw();
    return taken;
  }

  draw() {
    this.row.hidden = !this.urls.length;
    this.row.replaceChildren(...this.urls.map((url, i) => this.entry(url, i)));
  }

  entry(url, i) {
    const made = element("button", pictureNode(url));
    made.type = "button";
    made.className = "quiet";
    made.setAttribute("aria-label", `Remove picture ${i + 1}`);
    made.addEventListener("click", () => {
      this.urls.splice(i, 1);
      this.draw();
    });
    return made;
  }
}

// Files of a drop or a paste.
export const filesOf = (transfer) => [...(transfer?.files ?? [])];
