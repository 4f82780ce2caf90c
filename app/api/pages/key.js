// The API key: kept in sessionStorage (gone with the tab), sent with every request, asked for when a server wants one.

import { element } from "./markdown.js";

const STORED = "manta.apiKey";
let kept = ""; // where storage is forbidden, the page itself remembers

export function apiKey() {
  try {
    return sessionStorage.getItem(STORED) ?? kept;
  } catch {
    return kept;
  }
}

export function keepKey(key) {
  kept = key.trim();
  try {
    sessionStorage.setItem(STORED, kept);
  } catch {
    // this page works on, the other one will ask again
  }
}

export function authorization() {
  return apiKey() ? { Authorization: `Bearer ${apiKey()}` } : {};
}

// A form that says why it asks, and tells `onKey` once a key is kept.
export class KeyForm {
  constructor(onKey) {
    this.words = element("p");
    this.words.setAttribute("role", "alert");
    this.field = element("input");
    Object.assign(this.field, { type: "password", name: "key", required: true, autocomplete: "off" });
    this.field.setAttribute("aria-label", "API key");
    const button = element("button", "Use this key");
    button.type = "submit";
    this.node = element("form", this.words, this.field, button);
    this.node.className = "notice key-form";
    this.node.addEventListener("submit", (event) => {
      event.preventDefault();
      keepKey(this.field.value);
      onKey();
    });
  }

  // `said`: the server's own words.
  explain(said) {
    this.words.textContent = apiKey()
      ? `This API key is not accepted by the server${said ? `: ${said}` : ""}. Try another one.`
      : "This server wants an API key. It is kept until this tab closes.";
    this.field.value = "";
  }
}
