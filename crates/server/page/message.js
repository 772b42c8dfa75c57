// One turn as it is shown. Its parts are made once and then brought up to date, so that what is open, selected or typed stays.
import { thumbnail } from "./attachment.js";
import { button, copy, element, iconButton } from "./dom.js";
import { Growing } from "./markdown.js";
import { tokenView } from "./tokens.js";

const pretty = (json) => {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
};

const WHO = { user: "You", assistant: "Model" };

export class Message {
  // `acts` is what can be done with a turn: edit, retry, resume, remove, choose, results.
  constructor(turn, acts) {
    this.turn = turn;
    this.acts = acts;
    this.head = element("h3");
    this.text = element("div", { className: "text" });
    this.body = element("div", { className: "body" });
    this.tools = element("div", { className: "tools" });
    this.node = element("article", { className: `message ${turn.role}` }, this.head, this.body, this.tools);
    this.body.append(this.text);
    this.shown = {};
  }

  // Replaces a part where what it is made of is another than before.
  part(name, key, make, before) {
    if (this.shown[name]?.key === key) return;
    const node = make();
    const old = this.shown[name]?.node;
    if (old) {
      if (node) old.replaceWith(node);
      else old.remove();
    } else if (node) {
      if (before) before.before(node);
      else this.body.append(node);
    }
    this.shown[name] = { key, node };
  }

  // `at` is {isRunning, isBusy, isLast, number, place, places}.
  update(at) {
    const { turn } = this;
    const name = turn.role === "tool" ? `Result of ${turn.name ?? "a tool"}` : turn.role === "assistant" ? turn.model || WHO.assistant : WHO[turn.role];
    if (this.head.textContent !== name) this.head.textContent = name;
    this.node.classList.toggle("busy", at.isRunning);
    this.thoughts(at);
    if (turn.role === "assistant") this.answer(at);
    else this.words();
    this.attachments();
    this.calls(at);
    this.part("error", turn.error ?? "", () => {
      if (!turn.error) return null;
      const line = element("div", { className: "failed", role: "alert" }, element("p", { className: "error", textContent: turn.error }));
      line.append(element("div", { className: "buttons" }, button("Try again", () => this.acts.retry(turn)),
        ...(turn.text ? [button("Continue", () => this.acts.resume(turn))] : [])));
      return line;
    });
    this.part("figures", turn.figures ?? "", () => (turn.figures ? element("p", { className: "figures", textContent: turn.figures }) : null));
    this.buttons(at);
  }

  // What the model thought before it answered: closed, unless somebody opens it.
  thoughts({ isRunning }) {
    const { turn } = this;
    if (!turn.thoughts) return;
    if (!this.inner) {
      this.summary = element("summary");
      this.inner = element("div", { className: "quiet", dir: "auto" });
      this.inner.append(document.createTextNode(""));
      this.body.prepend(element("details", { className: "thoughts" }, this.summary, this.inner));
    }
    const said = isRunning && turn.text === "" ? "Thinking" : "Thoughts";
    if (this.summary.textContent !== said) this.summary.textContent = said;
    const text = this.inner.firstChild;
    if (turn.thoughts.startsWith(text.data)) text.appendData(turn.thoughts.slice(text.data.length));
    else text.data = turn.thoughts;
  }

  answer({ isRunning, number }) {
    const { turn } = this;
    const kind = turn.showTokens && turn.tokens?.length > 0 ? "tokens" : turn.structured ? "structured" : "text";
    if (this.kind !== kind) {
      this.kind = kind;
      this.text.replaceChildren();
      this.growing = kind === "text" ? new Growing(this.text) : null;
      if (kind === "structured") {
        this.code = element("code");
        this.text.append(element("pre", { tabIndex: 0, role: "region", "aria-label": "JSON" }, this.code));
      }
      if (kind === "tokens") this.text.append(tokenView(turn.tokens, number));
    }
    if (kind === "text") this.growing.show(turn.text, !isRunning);
    if (kind === "structured" && this.code.textContent !== turn.text) this.code.textContent = turn.text;
  }

  words() {
    const { turn } = this;
    this.text.dir = "auto";
    if (!turn.editing) {
      this.editor = null;
      if (this.text.firstElementChild || this.text.textContent !== turn.text) this.text.textContent = turn.text;
      return;
    }
    if (this.editor) return;
    const id = `edit-${turn.id}`;
    this.editor = element("textarea", { id, rows: Math.min(12, turn.text.split("\n").length + 2), value: turn.text, dir: "auto" });
    const done = (save) => () => {
      turn.editing = false;
      this.acts.edit(turn, save && this.editor.value.trim() !== "" ? this.editor.value : null);
    };
    this.editor.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        done(false)();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        done(true)();
      }
    });
    this.text.replaceChildren(element("label", { className: "unseen", textContent: "Edited message", htmlFor: id }), this.editor,
      element("div", { className: "buttons" }, button("Ask this instead", done(true), { className: "primary small" }), button("Cancel", done(false), { className: "small" })));
    queueMicrotask(() => this.editor?.focus());
  }

  attachments() {
    const files = this.turn.attachments ?? [];
    this.part("attachments", String(files.length), () => {
      if (files.length === 0) return null;
      return element("div", { className: "files" }, ...files.map((file) => (file.image ? thumbnail(file) : element("details", { className: "file" },
        element("summary", { textContent: `${file.name}, ${file.text.length.toLocaleString("en")} characters` }),
        element("pre", { tabIndex: 0, textContent: file.text, dir: "auto", role: "region", "aria-label": file.name })))));
    });
  }

  // The tools that the model calls. Whoever reads this is the one who can say what they return.
  calls({ isBusy, isLast }) {
    const calls = this.turn.calls ?? [];
    const asks = isLast && !isBusy && calls.length > 0;
    this.part("calls", `${asks} ${JSON.stringify(calls.map(({ name, arguments: given }) => [name, given]))}`, () => {
      if (calls.length === 0) return null;
      const node = element("div", { className: "calls" });
      calls.forEach((call, index) => {
        node.append(element("p", {}, "Calls ", element("code", { textContent: call.name })),
          element("pre", { tabIndex: 0, role: "region", "aria-label": `Arguments of ${call.name}` }, element("code", { textContent: pretty(call.arguments) })));
        if (!asks) return;
        const id = `result-${this.turn.id}-${index}`;
        node.append(element("label", { textContent: `Result of ${call.name}`, htmlFor: id }),
          element("textarea", { id, rows: 2, value: call.result ?? "", oninput: (event) => (call.result = event.target.value) }));
      });
      if (asks) node.append(button("Send results", () => this.acts.results(this.turn), { className: "primary" }));
      return node;
    });
  }

  buttons({ isBusy, isRunning, isLast, place, places }) {
    const { turn } = this;
    const has = turn.tokens?.length > 0;
    const key = [isBusy, isRunning, isLast, place, places, turn.editing, turn.showTokens, has, turn.finish].join();
    if (this.toolKey === key) return;
    this.toolKey = key;
    if (turn.editing || isRunning) {
      this.tools.replaceChildren();
      return;
    }
    // Who acts by keyboard stays where they were.
    const focused = this.tools.contains(document.activeElement) ? document.activeElement.dataset.act : null;
    const tools = [];
    const add = (act, name, title, run, more) => tools.push(iconButton(name, title, run, { "data-act": act, ...more }));
    if (places > 1) {
      add("previous", "previous", "Earlier version", () => this.acts.choose(turn, -1), { disabled: place === 0 });
      tools.push(element("span", { className: "places", textContent: `${place + 1}/${places}`, role: "img", "aria-label": `version ${place + 1} of ${places}` }));
      add("next", "next", "Later version", () => this.acts.choose(turn, 1), { disabled: place === places - 1 });
    }
    if (turn.role !== "tool") {
      add("copy", "copy", turn.role === "user" ? "Copy the question" : "Copy the answer as it was written", (event) => copy(turn.text, event.currentTarget));
    }
    if (turn.role === "user" && !isBusy) add("edit", "edit", "Edit and ask again", () => this.acts.edit(turn));
    if (turn.role === "assistant" && !isBusy) {
      add("retry", "retry", "Answer again", () => this.acts.retry(turn));
      if (isLast && turn.text && !turn.structured && !(turn.calls?.length > 0)) add("resume", "forward", "Continue this answer", () => this.acts.resume(turn));
    }
    if (has && !isBusy) {
      add("tokens", "chart", "Probabilities", () => {
        turn.showTokens = !turn.showTokens;
        this.acts.redraw();
        if (turn.showTokens) this.text.querySelector(".tokens").focus();
      }, { "aria-pressed": String(Boolean(turn.showTokens)) });
    }
    if (!isBusy) add("remove", "remove", "Delete this and what follows", () => this.acts.remove(turn));
    this.tools.replaceChildren(...tools);
    if (focused) this.tools.querySelector(`[data-act="${focused}"]`)?.focus();
  }
}

// Code is copied as it stands, wherever it stands.
document.addEventListener("click", (event) => {
  const pressed = event.target.closest?.(".copy-code");
  if (pressed) copy(pressed.closest(".code").querySelector("code").textContent, pressed);
});
