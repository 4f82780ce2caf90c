// Markdown to DOM nodes, for what models write. It only ever creates elements and text nodes: nothing a model writes
// is parsed as HTML, and links go to http, https and mailto only.

const FENCE = /^(\s*)(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 12; // of lists, quotes and emphasis inside one another
const MAX_SPAN = 4000; // characters of one piece of emphasis, code or link

// Tried in this order at each place of a line.
const INLINE = [
  [/^\\([\\`*_{}[\]()#+\-.!|~<>])/, (m) => m[1]],
  [/^(`+)([^]*?[^`])\1(?!`)/, (m) => element("code", m[2].replace(/^ (.*[^ ].*) $/, "$1"))],
  [/^\*{3}(?=\S)([^]*?\S)\*{3}/, (m, depth) => element("strong", element("em", ...inline(m[1], depth + 1)))],
  [/^\*\*(?=\S)([^]*?\S)\*\*/, (m, depth) => element("strong", ...inline(m[1], depth + 1))],
  [/^__(?=\S)([^]*?\S)__(?!\w)/, (m, depth) => element("strong", ...inline(m[1], depth + 1))],
  [/^~~(?=\S)([^]*?\S)~~/, (m, depth) => element("del", ...inline(m[1], depth + 1))],
  [/^\*(?![\s*])([^*]*?[^\s*])\*(?!\*)/, (m, depth) => element("em", ...inline(m[1], depth + 1))],
  [/^_(?![\s_])([^_]*?[^\s_])_(?![\w_])/, (m, depth) => element("em", ...inline(m[1], depth + 1))],
  [/^\[([^\]\n]+)\]\(\s*<?([^\s()<>]+(?:\([^\s()]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/, (m, depth) => link(m[2], inline(m[1], depth + 1), m[0])],
  [/^<(https?:\/\/[^\s<>]+)>/, (m) => link(m[1], [m[1]], m[0])],
  [/^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_]/, (m) => link(m[0], [m[0]], m[0])],
  [/^(?: {2,}|\\)\n/, () => element("br")],
  [/^\n/, () => element("br")],
];

export function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function link(address, children, source) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return source; // relative addresses would point into this server
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return source;
  const made = element("a", ...children);
  made.href = url.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const hit = mayOpen(text, at) ? match(text.slice(at, at + MAX_SPAN), depth) : null;
    if (hit === null) {
      plain += text[at++];
      continue;
    }
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(hit.node);
    at += hit.length;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function mayOpen(text, at) {
  if (!/\w/.test(text[at])) return true;
  return (text[at] === "_" || text[at] === "h") && !/\w/.test(text[at - 1] ?? "");
}

function match(rest, depth) {
  for (const [pattern, make] of INLINE) {
    const found = pattern.exec(rest);
    if (found) return { node: make(found, depth), length: found[0].length };
  }
  return null;
}

export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = (depth < MAX_DEPTH && special(lines, at, depth)) || paragraph(lines, at);
    out.push(block.node);
    at = block.end;
  }
  return out;
}

function special(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return fence(lines, at);
  if (HEADING.test(line)) {
    const [, marks, title] = HEADING.exec(line);
    // The page has its own h1 and h2.
    return { node: element(`h${Math.min(6, marks.length + 2)}`, ...inline(title)), end: at + 1 };
  }
  if (RULE.test(line)) return { node: element("hr"), end: at + 1 };
  if (QUOTE.test(line)) return quote(lines, at, depth);
  if (ITEM.test(line)) return list(lines, at, depth);
  return isTable(lines, at) ? table(lines, at) : null;
}

const isTable = (lines, at) => lines[at].includes("|") && TABLE_RULE.test(lines[at + 1] ?? "");
const isSpecial = (lines, at) =>
  [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(lines[at])) || isTable(lines, at);

function fence(lines, at) {
  const [, indent, marks, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(marks) && !lines[end].trim().replace(/[`~]/g, ""))) end++;
  const body = lines.slice(at + 1, end).map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line));
  return { node: codeBlock(body.join("\n"), language), end: end + 1 };
}

function codeBlock(source, language) {
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.className = "quiet copy-code";
  copy.setAttribute("aria-label", "Copy this code");
  const head = element("div", element("span", language || "text"), copy);
  head.className = "code-head";
  const pre = element("pre", element("code", source));
  pre.tabIndex = 0; // wide code scrolls: the keyboard must reach it
  const block = element("div", head, pre);
  block.className = "code";
  return block;
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length && QUOTE.test(lines[end]); end++) inner.push(QUOTE.exec(lines[end])[1]);
  return { node: element("blockquote", ...blocks(inner, depth + 1)), end };
}

function list(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = parseInt(marker, 10);
  let end = at;
  while (end < lines.length && isSibling(lines[end], indent.length, ordered)) {
    const first = ITEM.exec(lines[end])[3];
    const inset = lines[end].length - first.length;
    const item = [first];
    for (end++; end < lines.length && belongs(lines, end, indent.length); end++) {
      item.push(lines[end].slice(Math.min(indentOf(lines[end]), inset)));
    }
    made.append(listItem(item, depth));
    if (end < lines.length && !lines[end].trim() && isSibling(lines[end + 1] ?? "", indent.length, ordered)) end++;
  }
  return { node: made, end };
}

const indentOf = (line) => line.length - line.trimStart().length;

function isSibling(line, indent, ordered) {
  const found = ITEM.exec(line);
  if (!found || RULE.test(line) || /\d/.test(found[2]) !== ordered) return false;
  return found[1].length >= indent && found[1].length <= indent + 1;
}

function belongs(lines, at, indent) {
  const line = lines[at];
  if (!line.trim()) return indentOf(lines[at + 1] ?? "") > indent + 1;
  return indentOf(line) > indent + 1 || (Boolean(lines[at - 1].trim()) && !isSpecial(lines, at));
}

function listItem(lines, depth) {
  const inner = blocks(lines, depth + 1);
  // A tight item is its text, not a paragraph.
  const nodes = inner.flatMap((node, i) => (i === 0 && node.tagName === "P" ? [...node.childNodes] : [node]));
  return element("li", ...nodes);
}

function table(lines, at) {
  const aligns = cells(lines[at + 1]).map((cell) => (/:$/.test(cell) ? (/^:/.test(cell) ? "center" : "right") : "left"));
  const row = (line, name) => {
    const values = cells(line);
    return element("tr", ...aligns.map((align, i) => {
      const cell = element(name, ...inline(values[i] ?? ""));
      cell.className = align;
      return cell;
    }));
  };
  const body = element("tbody");
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end++) body.append(row(lines[end], "td"));
  const scroller = element("div", element("table", element("thead", row(lines[at], "th")), body));
  scroller.className = "table";
  scroller.tabIndex = 0;
  return { node: scroller, end };
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.replace(/\\\|/g, "|").trim());

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !isSpecial(lines, end)) end++;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd();
  return { node: element("p", ...inline(text)), end };
}
