// Markdown as nodes. Text of a model becomes text and never markup: no string is ever parsed as HTML.
function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

const SPANS = [
  [/^`+/, (rest, mark) => {
    const end = rest.indexOf(mark, mark.length);
    return end < 0 ? null : [element("code", rest.slice(mark.length, end)), end + mark.length];
  }],
  [/^(\*\*|__)(?=\S)/, (rest, mark, before) => emphasis("strong", rest, mark, before)],
  [/^[*_](?=\S)/, (rest, mark, before) => emphasis("em", rest, mark, before)],
  // Where a link leads is shown beside its text; only addresses of the web can be followed.
  [/^\[[^\]\n]+\]\([^()\s]+\)/, (rest, mark) => {
    const [, text, target] = /^\[([^\]]+)\]\(([^)]+)\)/.exec(mark);
    if (!/^https?:\/\//i.test(target)) return null;
    const link = element("a", text);
    link.href = target;
    link.rel = "noopener noreferrer nofollow";
    link.target = "_blank";
    return [link, mark.length];
  }],
];

function emphasis(name, rest, mark, before) {
  if (/[\p{L}\p{N}]$/u.test(before)) return null;
  for (let end = rest.indexOf(mark, mark.length); end > 0; end = rest.indexOf(mark, end + 1)) {
    const inner = rest.slice(mark.length, end);
    const behind = rest.slice(end + mark.length);
    const inWord = mark[0] === "_" && /^[\p{L}\p{N}]/u.test(behind);
    if (inner !== "" && !/\s$/.test(inner) && behind[0] !== mark[0] && !inner.endsWith(mark[0]) && !inWord) {
      return [element(name, ...inline(inner)), end + mark.length];
    }
  }
  return null;
}

export function inline(text) {
  const nodes = [];
  let plain = "";
  let at = 0;
  scan: while (at < text.length) {
    const rest = text.slice(at);
    if (rest[0] === "\\" && /^\\[!-/:-@[-`{-~]/.test(rest)) {
      plain += rest[1];
      at += 2;
      continue;
    }
    for (const [begins, make] of SPANS) {
      const mark = begins.exec(rest)?.[0];
      const made = mark && make(rest, mark, text.slice(0, at));
      if (made) {
        if (plain) nodes.push(plain);
        plain = "";
        nodes.push(made[0]);
        at += made[1];
        continue scan;
      }
    }
    plain += rest[0];
    at += 1;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

// The blocks of a text, in order. What is not known is a paragraph.
export function render(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  while (lines.length > 0) {
    const line = lines.shift();
    if (line.trim() === "") continue;
    const fence = /^\s*(`{3,}|~{3,})([^`]*)$/.exec(line);
    if (fence) {
      const code = [];
      while (lines.length > 0 && !(lines[0].trim().startsWith(fence[1]) && /^[`~]+$/.test(lines[0].trim()))) code.push(lines.shift());
      lines.shift();
      const block = element("pre", element("code", code.join("\n")));
      block.tabIndex = 0;
      block.setAttribute("aria-label", `Code ${fence[2].trim()}`.trim());
      block.setAttribute("role", "region");
      blocks.push(block);
      continue;
    }
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (heading) {
      // Below the message's own heading, and never a gap in their order.
      blocks.push(element("h4", ...inline(heading[2])));
      continue;
    }
    if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      blocks.push(element("hr"));
      continue;
    }
    if (/^\s*>/.test(line)) {
      const quoted = [line];
      while (lines.length > 0 && /^\s*>/.test(lines[0])) quoted.push(lines.shift());
      blocks.push(element("blockquote", ...render(quoted.map((line) => line.replace(/^\s*> ?/, "")).join("\n"))));
      continue;
    }
    if (ITEM.test(line)) {
      const items = [line];
      while (lines.length > 0 && (ITEM.test(lines[0]) || /^\s+\S/.test(lines[0]))) items.push(lines.shift());
      blocks.push(list(items));
      continue;
    }
    if (/^\s*\|.*\|\s*$/.test(line) && /^\s*\|[\s:|-]+\|\s*$/.test(lines[0] ?? "")) {
      const rows = [line];
      lines.shift();
      while (lines.length > 0 && /^\s*\|.*\|\s*$/.test(lines[0])) rows.push(lines.shift());
      blocks.push(table(rows));
      continue;
    }
    const paragraph = [line];
    while (lines.length > 0 && lines[0].trim() !== "" && !/^\s*(#{1,6}\s|`{3}|~{3}|>)/.test(lines[0]) && !ITEM.test(lines[0])) paragraph.push(lines.shift());
    const nodes = paragraph.flatMap((line, index) => (index > 0 ? [element("br"), ...inline(line)] : inline(line)));
    blocks.push(element("p", ...nodes));
  }
  return blocks;
}

function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length) items.push([item[3]]);
    else items.at(-1).push(line);
  }
  const node = element(ordered ? "ol" : "ul", ...items.map(([first, ...rest]) => element("li", ...inline(first), ...render(rest.join("\n")))));
  if (ordered) node.start = Number.parseInt(mark, 10);
  return node;
}

function table(rows) {
  const cells = (row) => row.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const [head, ...body] = rows.map(cells);
  const heads = head.map((cell) => {
    const th = element("th", ...inline(cell));
    th.scope = "col";
    return th;
  });
  const line = (row) => element("tr", ...row.map((cell) => element("td", ...inline(cell))));
  return element("table", element("thead", element("tr", ...heads)), element("tbody", ...body.map(line)));
}
