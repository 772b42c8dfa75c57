// Markdown as nodes. A library reads it; nodes are made here, one by one. Text of a model becomes text and never markup: no
// string is ever parsed as HTML, and nothing of an answer is loaded from anywhere.
import { element } from "./dom.js";
import { MarkdownIt } from "./markdown-it.js";

// Deeper nesting is shown as text.
const NESTING_MAX = 60;
// A formula within a line in characters, and a block of its own in lines: what opens one and is never closed costs no more to
// look at.
const INLINE_FORMULA_MAX = 1000;
const BLOCK_FORMULA_MAX = 100;
// Longer code has no colours.
const COLOURED_MAX = 40_000;

const reader = new MarkdownIt("default", { html: false, linkify: true, breaks: true, maxNesting: NESTING_MAX });
// Addresses begin with their scheme: a word with a dot in it is no link.
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
reader.validateLink = (address) => /^(https?:\/\/|mailto:)/i.test(address);

// `$x$` and `\(x\)` within a line; `$$x$$` and `\[x\]` also over several lines. Behind a dollar no space, before the closing
// one no space and behind it no digit, so that prices stay prices.
function formulaInLine(state, silent) {
  const { src, pos, posMax } = state;
  const open = src.startsWith("$$", pos) ? "$$" : src[pos] === "$" ? "$"
    : src.startsWith("\\(", pos) ? "\\(" : src.startsWith("\\[", pos) ? "\\[" : null;
  if (!open) return false;
  const close = { $: "$", $$: "$$", "\\(": "\\)", "\\[": "\\]" }[open];
  const from = pos + open.length;
  const within = src.slice(from, Math.min(posMax, from + INLINE_FORMULA_MAX));
  let length = within.indexOf(close);
  // An escaped dollar is none.
  while (open === "$" && length > 0 && within[length - 1] === "\\") length = within.indexOf(close, length + 1);
  if (length < 0) return false;
  const end = from + length;
  const formula = src.slice(from, end);
  if (formula.trim() === "") return false;
  if (open === "$" && (/^\s|\s$/.test(formula) || /\d/.test(src[end + 1] ?? "") || formula.includes("`"))) return false;
  if (!silent) {
    const token = state.push("formula", "", 0);
    token.content = formula;
    token.markup = open;
    token.block = open === "$$" || open === "\\[";
  }
  state.pos = end + close.length;
  return true;
}

function formulaBlock(state, startLine, endLine, silent) {
  const begin = state.bMarks[startLine] + state.tShift[startLine];
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const open = state.src.slice(begin, begin + 2);
  const close = { $$: "$$", "\\[": "\\]" }[open];
  if (!close) return false;
  const lines = [];
  for (let line = startLine; line < Math.min(endLine, startLine + BLOCK_FORMULA_MAX); line += 1) {
    const from = line === startLine ? begin + 2 : state.bMarks[line] + Math.min(state.tShift[line], state.blkIndent);
    if (line > startLine && state.sCount[line] < state.blkIndent) return false;
    const text = state.src.slice(from, state.eMarks[line]);
    const end = text.indexOf(close);
    if (end < 0) {
      lines.push(text);
      continue;
    }
    // Text behind it on the same line: the rule for lines takes it.
    if (text.slice(end + 2).trim() !== "") return false;
    lines.push(text.slice(0, end));
    if (lines.join("").trim() === "") return false;
    if (silent) return true;
    state.line = line + 1;
    const token = state.push("formula", "", 0);
    token.content = lines.join("\n");
    token.markup = open;
    token.block = true;
    token.map = [startLine, state.line];
    return true;
  }
  return false;
}

reader.inline.ruler.before("escape", "formula", formulaInLine);
reader.block.ruler.before("fence", "formula", formulaBlock, { alt: ["paragraph", "reference", "blockquote", "list"] });

// What is loaded only where it is needed.
const late = {
  math: { file: "./temml.js", style: "/console/temml.css", loaded: null, wanted: false },
  highlight: { file: "./highlight.js", loaded: null, wanted: false },
};

function want(name) {
  const one = late[name];
  if (one.loaded || one.wanted) return one.loaded;
  one.wanted = true;
  if (one.style) document.head.append(element("link", { rel: "stylesheet", href: one.style }));
  import(one.file).then((module) => {
    one.loaded = module;
    finish(document);
  }, () => {
    // Without it formulas and code stay as they were written; the next answer tries again.
    one.wanted = false;
  });
  return null;
}

// A formula as MathML, or as it was written until that can be made, or where it is none.
function formula(text, isBlock, written) {
  const library = want("math");
  if (!library) {
    return element("code", { className: "formula", textContent: text, "data-block": isBlock ? "1" : "", "data-written": written, dir: "ltr" });
  }
  try {
    return library.math(text, isBlock);
  } catch {
    return element("code", { className: "no-formula", textContent: written, dir: "ltr" });
  }
}

function coloured(tree) {
  return tree.children.map((child) => {
    if (typeof child === "string") return child;
    const node = element("span", {}, ...coloured(child));
    if (child.scope) node.className = `c-${child.scope.split(".")[0].replaceAll("_", "-")}`;
    return node;
  });
}

// Formulas and colours for what was made before the libraries came. Blocks that still grow have no colours yet.
export function finish(host) {
  if (late.math.loaded) {
    for (const node of host.querySelectorAll("code.formula")) {
      node.replaceWith(formula(node.textContent, node.dataset.block === "1", node.dataset.written));
    }
  }
  for (const node of host.querySelectorAll(".code code[data-language]")) {
    const text = node.textContent;
    if (text.length > COLOURED_MAX || node.closest(".grows")) continue;
    const library = want("highlight");
    if (!library) return;
    const tree = library.highlight(text, node.dataset.language);
    delete node.dataset.language;
    if (tree) node.replaceChildren(...coloured(tree));
  }
}

function codeBlock(text, info) {
  const language = /^[\w+#.-]+/.exec(info.trim())?.[0] ?? "";
  const code = element("code", { textContent: text.replace(/\n$/, "") });
  if (language) code.dataset.language = language.toLowerCase();
  return element("div", { className: "code", dir: "ltr" },
    element("div", { className: "code-head" }, element("span", { textContent: language }),
      element("button", { type: "button", className: "copy-code", textContent: "Copy", "aria-label": `Copy this code${language && ` in ${language}`}` })),
    element("pre", { tabIndex: 0, role: "region", "aria-label": `Code ${language}`.trim() }, code));
}

function link(address) {
  const node = element("a", { rel: "noopener noreferrer nofollow", target: "_blank", title: address });
  node.href = address;
  return node;
}

const TASK = /^\[([ xX])\](?=\s|$)/;
// Each has the direction of its own text.
const HAS_DIRECTION = new Set(["paragraph_close", "heading_close", "list_item_close", "blockquote_close", "td_close", "th_close"]);
const PLAIN = {
  blockquote_open: "blockquote", bullet_list_open: "ul", tbody_open: "tbody", thead_open: "thead", tr_open: "tr",
  em_open: "em", strong_open: "strong", s_open: "s", hr: "hr",
};

function begun(token) {
  if (PLAIN[token.type]) return element(PLAIN[token.type]);
  switch (token.type) {
    case "paragraph_open": return element("p");
    // Below the message's own heading, and never a gap in their order; how large it is says its class.
    case "heading_open": return element("h4", { className: `level-${token.tag[1]}` });
    case "ordered_list_open": return element("ol", { start: Number(token.attrGet("start") ?? 1) });
    case "list_item_open": return element("li");
    case "table_open": return element("table");
    case "th_open": return element("th", { scope: "col", className: aligned(token) });
    case "td_open": return element("td", { className: aligned(token) });
    case "link_open": return link(token.attrGet("href"));
    default: return element("span");
  }
}

const aligned = (token) => /text-align:(center|right)/.exec(token.attrGet("style") ?? "")?.[1] ?? "";

function leaf(token) {
  switch (token.type) {
    case "text": return token.content;
    case "text_special": return token.content;
    case "softbreak": case "hardbreak": return element("br");
    case "code_inline": return element("code", { textContent: token.content, dir: "ltr" });
    case "fence": return codeBlock(token.content, token.info);
    case "code_block": return codeBlock(token.content, "");
    case "hr": return element("hr");
    case "formula": {
      const close = { $: "$", $$: "$$", "\\(": "\\)", "\\[": "\\]" }[token.markup];
      const node = formula(token.content.trim(), token.block, token.markup + token.content + close);
      return token.block ? element("span", { className: "formula-block", tabIndex: 0, role: "group", "aria-label": "Formula" }, node) : node;
    }
    case "image": {
      // Nothing is loaded from elsewhere: a picture is a link to it.
      const address = token.attrGet("src");
      const node = link(address);
      node.textContent = `picture: ${token.content || address}`;
      return node;
    }
    default: return token.content;
  }
}

function task(item, tokens) {
  const first = tokens[0];
  const mark = first?.type === "text" && TASK.exec(first.content);
  if (!mark) return;
  first.content = first.content.slice(mark[0].length);
  const isDone = mark[1] !== " ";
  item.classList.add("task");
  item.append(element("span", { className: "box", role: "img", "aria-label": isDone ? "done" : "not done", textContent: isDone ? "☑" : "☐" }));
}

function build(tokens, host) {
  const open = [host];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.type === "inline") {
      if (top.tagName === "LI" || (top.tagName === "P" && top.parentNode?.tagName === "LI" && top.parentNode.firstChild === top)) {
        if (top.childNodes.length === 0) task(top, token.children);
      }
      build(token.children, top);
    } else if (token.nesting === 1) {
      // The paragraphs of a tight list are not shown as such.
      const node = token.hidden ? top : begun(token);
      if (node !== top) top.append(token.type === "table_open" ? element("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" }, node) : node);
      open.push(node);
    } else if (token.nesting === -1) {
      // Set when all of it is there: a browser looks through it whenever something is added.
      const node = open.pop();
      if (HAS_DIRECTION.has(token.type) && !token.hidden) node.dir = "auto";
    } else {
      top.append(leaf(token));
    }
  }
}

// The blocks of a text: where each begins, its source, and the tokens that it is made of.
function read(text) {
  const env = {};
  const tokens = reader.parse(text, env);
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  const blocks = [];
  for (let first = 0; first < tokens.length;) {
    let last = first;
    for (let depth = tokens[first].nesting; depth > 0; depth += tokens[last].nesting) last += 1;
    const [from, to] = tokens[first].map;
    blocks.push({ at: starts[from], source: text.slice(starts[from], starts[to] ?? text.length), tokens: tokens.slice(first, last + 1) });
    first = last + 1;
  }
  // A link's address may stand anywhere, and be needed before.
  return { blocks, refers: env.references !== undefined };
}

function made(block) {
  const host = document.createDocumentFragment();
  build(block.tokens, host);
  return host.firstChild;
}

// Makes `old` like `fresh` and keeps what is equal: what is selected there stays selected. The node that then stands there.
function patch(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.nodeName === "math") {
    old.replaceWith(fresh);
    return fresh;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) {
      if (fresh.data !== old.data) old.appendData(fresh.data.slice(old.data.length));
    } else {
      old.data = fresh.data;
    }
    return old;
  }
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    if (!at) {
      old.append(child);
      continue;
    }
    const behind = at.nextSibling;
    patch(at, child);
    at = behind;
  }
  while (at) {
    const behind = at.nextSibling;
    at.remove();
    at = behind;
  }
  return old;
}

const clean = (text) => text.replaceAll("\r\n", "\n").replaceAll("\r", "\n").replaceAll("\0", "\uFFFD");

// A text that grows at its end. Only its last two blocks can still change: a line that is not whole yet may join the block before.
export class Growing {
  constructor(host) {
    this.host = host;
    this.text = "";
    this.blocks = [];
  }

  // Shows `whole`; `isDone` when nothing more will come.
  show(whole, isDone) {
    const text = clean(whole);
    const grew = text.startsWith(this.text);
    const kept = grew && !isDone ? Math.max(0, this.blocks.length - 2) : 0;
    const from = kept > 0 ? this.blocks[kept].at : 0;
    const { blocks, refers } = read(text.slice(from));
    this.text = text;
    for (const [index, block] of blocks.entries()) {
      const there = this.blocks[kept + index];
      block.at += from;
      if (there && there.source === block.source && !refers) {
        block.node = there.node;
      } else {
        const node = made(block);
        if (there) {
          block.node = patch(there.node, node);
        } else {
          this.host.append(node);
          block.node = node;
        }
      }
      // Only used to make nodes.
      block.tokens = null;
      const grows = !isDone && index === blocks.length - 1;
      block.node.classList.toggle("grows", grows);
    }
    for (const gone of this.blocks.slice(kept + blocks.length)) gone.node.remove();
    this.blocks.splice(kept, Infinity, ...blocks);
    finish(this.host);
  }
}

// The nodes of a whole text.
export function render(text) {
  const host = document.createDocumentFragment();
  for (const block of read(clean(text)).blocks) host.append(made(block));
  finish(host);
  return [...host.childNodes];
}
