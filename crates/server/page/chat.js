// The conversation: asking, stopping, asking again, editing, and how likely each token was.
import { get, stream } from "./api.js";
import { render } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const messages = $("messages");

// What was said: {role, text, thoughts, calls, tokens, figures, error, showTokens}. A tool's result has the id of its call.
let turns = [];
let running = null;

// How often an answer is drawn anew while it comes, in milliseconds.
const DRAW_EVERY = 80;
// Alternatives that are asked for each token.
const ALTERNATIVES = 5;

function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function button(text, act, pressed) {
  const node = element("button", { type: "button", textContent: text, onclick: act });
  if (pressed !== undefined) node.setAttribute("aria-pressed", pressed);
  return node;
}

const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : "under 0.1 %";
};
// Spaces and line ends can be seen.
const visible = (piece) => piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "(empty)";

function tokenView(turn, number) {
  const panel = element("div", { className: "candidates" });
  panel.setAttribute("aria-live", "polite");
  const list = element("div", { className: "tokens mono", tabIndex: 0 });
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Tokens with their probabilities; arrow keys move");
  let current = -1;
  const choose = (index) => {
    list.children[current]?.removeAttribute("aria-current");
    list.children[current]?.setAttribute("aria-selected", "false");
    current = Math.max(0, Math.min(index, turn.tokens.length - 1));
    const node = list.children[current];
    node.setAttribute("aria-current", "true");
    node.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", node.id);
    const { token, logprob, top } = turn.tokens[current];
    const rows = top.map((other) => element("tr", {},
      element("td", { className: "mono", textContent: visible(other.token) }),
      element("td", { className: "number", textContent: percent(other.logprob) })));
    const heads = ["Token", "Probability"].map((text) => element("th", { scope: "col", textContent: text }));
    panel.replaceChildren(
      element("p", { className: "quiet", textContent: `“${visible(token)}” had ${percent(logprob)}` }),
      element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
  };
  turn.tokens.forEach(({ token, logprob }, index) => {
    const share = Math.exp(logprob);
    const kind = share >= 0.8 ? "" : share >= 0.3 ? " unsure" : " unlikely";
    const node = element("span", { className: `token${kind}`, id: `token-${number}-${index}`, textContent: token });
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", "false");
    node.setAttribute("aria-label", `${visible(token)}, ${percent(logprob)}`);
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
  return element("div", {}, list, panel);
}

// What the model thought before it answered: closed, unless somebody opens it.
function thoughts(turn, number) {
  const node = element("details", { className: "thoughts", open: Boolean(turn.showThoughts) },
    element("summary", { textContent: turn === running?.turn && turn.text === "" ? "Thinking" : "Thoughts" }),
    element("div", { className: "quiet", id: `thoughts-${number}`, textContent: turn.thoughts }));
  node.addEventListener("toggle", () => {
    turn.showThoughts = node.open;
  });
  return node;
}

const pretty = (json) => {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
};

// The tools that the model calls. Whoever reads this is the one who can say what they return.
function calls(turn, number) {
  const node = element("div", { className: "calls" });
  turn.calls.forEach((call, index) => {
    node.append(element("p", {}, "Calls ", element("code", { textContent: call.name })),
      element("pre", { tabIndex: 0 }, element("code", { textContent: pretty(call.arguments) })));
    if (number < turns.length - 1 || running) return;
    const id = `result-${number}-${index}`;
    node.append(element("label", { textContent: `Result of ${call.name}`, htmlFor: id }),
      element("textarea", { id, rows: 2, value: call.result ?? "", oninput: (event) => (call.result = event.target.value) }));
  });
  if (number === turns.length - 1 && !running) {
    node.append(button("Send results", () => {
      turns.push(...turn.calls.map(({ id, name, result }) => ({ role: "tool", id, name, text: result ?? "" })));
      answer();
    }));
  }
  return node;
}

const WHO = { user: "You", assistant: "Model" };

function message(turn, number) {
  const mine = turn.role === "user";
  const text = element("div", { className: "text" });
  if (turn.editing) {
    const label = element("label", { className: "unseen", textContent: "Edited message", htmlFor: `edit-${number}` });
    const field = element("textarea", { id: `edit-${number}`, rows: 3, value: turn.text });
    const done = (save) => () => {
      turn.editing = false;
      if (!save || field.value.trim() === "") return draw(number);
      turns = turns.slice(0, number);
      turns.push({ role: "user", text: field.value });
      answer();
    };
    const buttons = element("div", { className: "buttons" }, button("Ask this instead", done(true)), button("Cancel", done(false)));
    text.append(label, field, buttons);
    queueMicrotask(() => field.focus());
  } else if (mine || turn.role === "tool") {
    text.textContent = turn.text;
  } else if (turn.showTokens && turn.tokens?.length > 0) {
    text.append(tokenView(turn, number));
  } else if (turn.structured) {
    text.append(element("pre", { tabIndex: 0 }, element("code", { textContent: turn.text })));
  } else {
    text.append(...render(turn.text));
  }
  text.classList.toggle("busy", turn === running?.turn);
  const node = element("article", { className: `message ${turn.role}` },
    element("h3", { textContent: WHO[turn.role] ?? `Result of ${turn.name}` }));
  if (turn.thoughts) node.append(thoughts(turn, number));
  node.append(text);
  if (turn.calls?.length > 0) node.append(calls(turn, number));
  if (turn.error) {
    const line = element("p", { className: "error", textContent: turn.error });
    line.setAttribute("role", "alert");
    node.append(line);
  }
  if (turn.figures) node.append(element("p", { className: "figures", textContent: turn.figures }));
  const tools = element("div", { className: "tools" });
  if (mine && !turn.editing && !running) {
    tools.append(button("Edit", () => {
      turn.editing = true;
      draw(number);
    }));
  }
  if (!mine && !running && turn.tokens?.length > 0) {
    tools.append(button("Probabilities", () => {
      turn.showTokens = !turn.showTokens;
      draw(number);
      messages.children[number].querySelector(turn.showTokens ? ".tokens" : ".tools button")?.focus();
    }, Boolean(turn.showTokens)));
  }
  node.append(tools);
  return node;
}

function draw(number) {
  const atEnd = messages.scrollTop + messages.clientHeight >= messages.scrollHeight - 40;
  const node = message(turns[number], number);
  if (messages.children[number]) messages.children[number].replaceWith(node);
  else messages.append(node);
  if (atEnd) messages.scrollTop = messages.scrollHeight;
}

function drawAll() {
  while (messages.children.length > turns.length) messages.lastChild.remove();
  turns.forEach((_, number) => draw(number));
  const answered = turns.at(-1)?.role === "assistant";
  $("send").disabled = Boolean(running);
  $("stop").disabled = !running;
  $("regenerate").disabled = Boolean(running) || !answered;
  messages.setAttribute("aria-busy", Boolean(running));
}

const number = (id) => ($(id).value.trim() === "" ? undefined : Number($(id).value));

// A turn as the API has it. Thoughts are not sent back: templates leave those of earlier answers out.
function asSaid({ role, text, calls, id }) {
  if (role === "tool") return { role, tool_call_id: id, content: text };
  if (!calls?.length) return { role, content: text };
  const made = ({ id: call, name, arguments: given }) => ({ id: call, type: "function", function: { name, arguments: given } });
  return { role, content: text || null, tool_calls: calls.map(made) };
}

function parsed(id, what) {
  try {
    return JSON.parse($(id).value);
  } catch (error) {
    throw new Error(`${what} no JSON: ${error.message}`);
  }
}

// What is asked, or an error that says which parameter is wrong.
function body() {
  const said = turns.filter((turn) => turn.text !== "" || turn.calls?.length > 0 || turn.role === "tool").map(asSaid);
  const system = $("system").value.trim();
  const asked = {
    messages: system ? [{ role: "system", content: system }, ...said] : said,
    temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed: number("seed"),
    stream: true, stream_options: { include_usage: true },
  };
  if ($("model").value) asked.model = $("model").value;
  if ($("probabilities").checked) Object.assign(asked, { logprobs: true, top_logprobs: ALTERNATIVES });
  if ($("structured").checked) {
    const schema = parsed("schema", "The schema is");
    asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if ($("offers").checked) asked.tools = parsed("offered", "The tools are");
  return asked;
}

async function answer() {
  let asked;
  try {
    $("schema-error").textContent = "";
    asked = body();
  } catch (error) {
    $("schema-error").textContent = error.message;
    return drawAll();
  }
  const turn = { role: "assistant", text: "", thoughts: "", calls: [], tokens: [], structured: $("structured").checked };
  const controller = new AbortController();
  running = { turn, controller };
  turns.push(turn);
  drawAll();
  $("progress").textContent = "Answering";
  const began = performance.now();
  let first = null;
  let usage = null;
  let finish = null;
  let drawn = 0;
  let last = began;
  try {
    for await (const part of stream("/v1/chat/completions", asked, controller.signal)) {
      usage = part.usage ?? usage;
      const [choice] = part.choices;
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      for (const { token, logprob, top_logprobs: top } of choice.logprobs?.content ?? []) turn.tokens.push({ token, logprob, top });
      const { content, reasoning_content: thought, tool_calls: called } = choice.delta ?? {};
      if (!content && !thought && !called) continue;
      first ??= performance.now();
      last = performance.now();
      turn.text += content ?? "";
      turn.thoughts += thought ?? "";
      for (const { index, id, function: part } of called ?? []) {
        const call = (turn.calls[index] ??= { id: "", name: "", arguments: "" });
        call.id = id ?? call.id;
        call.name += part?.name ?? "";
        call.arguments += part?.arguments ?? "";
      }
      if (last - drawn > DRAW_EVERY) {
        drawn = last;
        draw(turns.length - 1);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else turn.error = error.message;
  }
  running = null;
  const words = [];
  if (usage) {
    words.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && last > first) words.push(`${((usage.completion_tokens - 1) / (last - first) * 1000).toFixed(1)} tokens/s`);
    words.push(`prompt ${usage.prompt_tokens} tokens, ${usage.prompt_tokens_details?.cached_tokens ?? 0} of them cached`);
  }
  if (first) words.push(`first token after ${Math.round(first - began)} ms`);
  if (finish === "length") words.push("cut by the limit");
  if (finish === "stopped") words.push("stopped");
  turn.figures = words.join(", ");
  $("progress").textContent = turn.error ? "The answer failed" : finish === "stopped" ? "Stopped" : "The answer is complete";
  drawAll();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("question").value;
  if (running || text.trim() === "") return;
  $("question").value = "";
  turns.push({ role: "user", text });
  answer();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  } else if (event.key === "Escape" && running) {
    running.controller.abort();
  }
});
$("stop").addEventListener("click", () => {
  running?.controller.abort();
  $("question").focus();
});
$("regenerate").addEventListener("click", () => {
  while (turns.at(-1)?.role === "assistant") turns.pop();
  if (turns.length > 0) answer();
});
$("clear").addEventListener("click", () => {
  running?.controller.abort();
  turns = [];
  $("progress").textContent = "";
  drawAll();
  $("question").focus();
});
for (const [box, field] of [["structured", "schema"], ["offers", "offered"]]) {
  $(box).addEventListener("change", () => {
    $(field).disabled = !$(box).checked;
  });
}
$("parameters").addEventListener("submit", (event) => event.preventDefault());

// Where there are several models one can be chosen.
export async function listModels() {
  const { data } = await get("/v1/models");
  const chosen = $("model").value;
  $("model").replaceChildren(...data.map(({ id }) => element("option", { value: id, textContent: id })));
  if (data.some(({ id }) => id === chosen)) $("model").value = chosen;
  $("models").hidden = data.length < 2;
}
