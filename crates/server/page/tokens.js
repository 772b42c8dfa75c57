// An answer token by token: how likely each was, and what else could have stood there.
import { element } from "./dom.js";

const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "under 0.1 %";
};
// Spaces and line ends can be seen.
const visible = (piece) => piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "(empty)";
const KINDS = [[0.8, "likely", "80 % or more"], [0.3, "unsure", "30 to 80 %"], [0, "unlikely", "below 30 %"]];
const kind = (share) => KINDS.find(([least]) => share >= least)[1];

export function tokenView(tokens, name) {
  const panel = element("div", { className: "candidates", "aria-live": "polite" });
  const list = element("div", { className: "tokens mono", tabIndex: 0, role: "listbox", "aria-label": "Tokens with their probabilities; arrow keys move" });
  let current = -1;
  const choose = (index) => {
    list.children[current]?.removeAttribute("aria-current");
    list.children[current]?.setAttribute("aria-selected", "false");
    current = Math.max(0, Math.min(index, tokens.length - 1));
    const node = list.children[current];
    node.setAttribute("aria-current", "true");
    node.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", node.id);
    const { token, logprob, top } = tokens[current];
    const rows = top.map((other) => element("tr", { className: other.token === token ? "chosen" : "" },
      element("td", { className: "mono", textContent: visible(other.token) }),
      element("td", { className: "number", textContent: percent(other.logprob) })));
    const heads = ["Token", "Probability"].map((text) => element("th", { scope: "col", textContent: text }));
    panel.replaceChildren(
      element("p", { className: "quiet", textContent: `“${visible(token)}” had ${percent(logprob)}` }),
      element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
  };
  tokens.forEach(({ token, logprob }, index) => {
    const node = element("span", {
      className: `token ${kind(Math.exp(logprob))}`, id: `token-${name}-${index}`, textContent: token, role: "option",
      "aria-selected": "false", "aria-label": `${visible(token)}, ${percent(logprob)}`,
    });
    node.addEventListener("pointerenter", () => choose(index));
    list.append(node);
  });
  list.addEventListener("focus", () => current < 0 && choose(0));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    choose(current + step);
  });
  const legend = element("p", { className: "legend tokens-legend" }, "Each token is underlined by how likely it was: ",
    ...KINDS.map(([, name, words]) => element("span", { className: `token ${name}`, textContent: words })));
  return element("div", {}, legend, list, panel);
}
