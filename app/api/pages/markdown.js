// Markdown to DOM nodes, for what models write. markdown-it parses; this file makes elements and text nodes of its
// tokens, so nothing a model writes is ever parsed as HTML, and links go to http, https and mailto only.

import MarkdownIt from "./vendor/markdown-it.js";

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true }, { maxNesting: 40 });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.disable("image"); // an image would tell another server who reads
parser.validateLink = (address) => {
  try {
    return ["http:", "https:", "mailto:"].includes(new URL(address).protocol);
  } catch {
    return false; // relative addresses would point into this server
  }
};

// Leaf tokens that are more than an element of their own tag.
const LEAVES = {
  text: (token) => [token.content],
  softbreak: () => [element("br")],
  hardbreak: () => [element("br")],
  hr: () => [element("hr")],
  code_inline: (token) => [element("code", token.content)],
  fence: (token) => [codeBlock(token.content, token.info.trim().split(/\s/)[0])],
  code_block: (token) => [codeBlock(token.content, "")],
  inline: (token) => tree(token.children),
};

// How an element differs from what its token says.
const ELEMENTS = {
  heading_open: (token, children) => element(`h${Math.min(6, Number(token.tag[1]) + 2)}`, ...children), // the page has h1 and h2
  link_open: (token, children) => link(token.attrGet("href"), children),
  s_open: (token, children) => element("del", ...children),
  table_open: (token, children) => table(children),
  th_open: cell,
  td_open: cell,
  ordered_list_open: (token, children) => Object.assign(element("ol", ...children), { start: token.attrGet("start") ?? 1 }),
};

export function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...tree(parser.parse(text, {})));
  return fragment;
}

// markdown-it gives a flat list, with an opening and a closing token around the content of each element.
function tree(tokens) {
  const open = [{ children: [] }];
  for (const token of tokens) {
    if (token.nesting === 1) open.push({ token, children: [] });
    else if (token.nesting === -1) close(open);
    else open.at(-1).children.push(...(LEAVES[token.type] ?? LEAVES.text)(token));
  }
  return open[0].children;
}

function close(open) {
  const { token, children } = open.pop();
  const make = ELEMENTS[token.type] ?? ((opened, content) => element(opened.tag, ...content));
  // The paragraph of an item in a tight list is its text alone.
  open.at(-1).children.push(...(token.hidden ? children : [make(token, children)]));
}

function link(address, children) {
  const made = element("a", ...children);
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

function codeBlock(source, language) {
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.className = "quiet copy-code";
  copy.setAttribute("aria-label", "Copy this code");
  const head = element("div", element("span", language || "text"), copy);
  head.className = "code-head";
  const pre = element("pre", element("code", source.replace(/\n$/, "")));
  pre.tabIndex = 0; // wide code scrolls: the keyboard must reach it
  const block = element("div", head, pre);
  block.className = "code";
  return block;
}

function cell(token, children) {
  const made = element(token.tag, ...children);
  made.className = token.attrGet("style")?.replace("text-align:", "") ?? "left"; // no inline styles on this page
  return made;
}

function table(children) {
  const scroller = element("div", element("table", ...children));
  scroller.className = "table";
  scroller.tabIndex = 0;
  return scroller;
}
