// What goes with the next message beside its text, as data URLs: shown in a row until it is sent or removed.

import { element } from "./markdown.js";

// A file's or recording's data URL.
export function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

export class Attachments {
  constructor(row) {
    this.row = row;
    this.urls = [];
  }

  take() {
    const taken = this.urls;
    this.urls = [];
    this.draw();
    return taken;
  }

  draw() {
    this.row.hidden = !this.urls.length;
    this.row.replaceChildren(...this.urls.flatMap((url, i) => this.entry(url, i)));
  }

  // A button that removes entry i, a `kind`.
  remover(kind, i, shown) {
    const made = element("button", shown);
    made.type = "button";
    made.className = "quiet";
    made.setAttribute("aria-label", `Remove ${kind} ${i + 1}`);
    made.addEventListener("click", () => {
      this.urls.splice(i, 1);
      this.draw();
    });
    return made;
  }
}
