// Nodes, and what the pages have in common. Nothing here parses text as markup.
export const $ = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

// Strokes in a square of 24.
const ICONS = {
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 4v7h-7",
  forward: "M5 5l8 7-8 7zM17 5v14",
  remove: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13M10 11v5M14 11v5",
  previous: "M15 5l-7 7 7 7",
  next: "M9 5l7 7-7 7",
  chart: "M5 20V11M12 20V4M19 20v-6",
  close: "M6 6l12 12M18 6L6 18",
  rename: "M4 20h16M6 15l9-9 3 3-9 9H6z",
  save: "M12 4v11M7 11l5 5 5-5M4 20h16",
  load: "M12 16V5M7 9l5-5 5 5M4 20h16",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function button(text, act, properties = {}) {
  return element("button", { type: "button", textContent: text, onclick: act, ...properties });
}

// A button that shows an icon and says its name.
export function iconButton(name, title, act, properties = {}) {
  return element("button", { type: "button", className: "plain", title, "aria-label": title, onclick: act, ...properties }, icon(name));
}

export const amount = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${units[unit]}`;
};

export const count = (number) => number.toLocaleString("en");

// A row of a table: cells are values, or [value, class].
export function row(cells) {
  return element("tr", {}, ...cells.map((cell) => {
    const [value, kind] = Array.isArray(cell) ? cell : [cell, ""];
    return element("td", { className: kind ?? "" }, value ?? "");
  }));
}

// A line that says what was done, with a way back where there is one. It goes by itself.
export function say(text, undo) {
  const line = $("said");
  line.replaceChildren(element("span", { textContent: text }));
  if (undo) {
    line.append(button("Undo", () => {
      line.hidden = true;
      undo();
    }));
  }
  line.hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => (line.hidden = true), undo ? 8000 : 3000);
}

// A file that the browser keeps where it keeps downloads.
export function download(name, text, type) {
  const link = element("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages of plain HTTP on another machine have no clipboard: what is selected can still be copied.
    const field = element("textarea", { value: text, className: "unseen" });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  if (from?.classList.contains("plain")) {
    from.replaceChildren(icon("check"));
    setTimeout(() => from.replaceChildren(icon("copy")), 1500);
  } else if (from) {
    from.textContent = "Copied";
    setTimeout(() => (from.textContent = "Copy"), 1500);
  }
  say("Copied");
}
