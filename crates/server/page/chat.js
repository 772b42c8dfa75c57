// The conversation: asking, stopping, going on, asking again, and the branches that this makes.
import { stream, Gone } from "./api.js";
import * as attachment from "./attachment.js";
import { $, copy, count, element, iconButton, say } from "./dom.js";
import * as history from "./history.js";
import { Message } from "./message.js";
import { chosen, listModels } from "./models.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

// How often an answer is drawn while it comes, in milliseconds; less often where drawing takes long.
const DRAW_EVERY = 80;
// How often an answer that is not whole is kept, in milliseconds.
const KEEP_EVERY = 2000;
// From this share of the context on it is said to be nearly full.
const NEARLY_FULL = 0.8;

let conversation = store.newConversation();
// What is answered now, by conversation: {turn, controller, conversation}.
const running = new Map();
// What is shown, by turn.
const views = new Map();
// Deleted while they were answered: what still arrives is not kept.
const forgotten = new Set();
// Files that the next question takes along.
let attached = [];

const scroller = $("scroller");
const isAtEnd = () => scroller.scrollTop + scroller.clientHeight >= scroller.scrollHeight - 60;
const toEnd = () => (scroller.scrollTop = scroller.scrollHeight);

function complain(text) {
  $("ask-error").textContent = text;
}

const acts = {
  edit(turn, text) {
    if (text === undefined) turn.editing = true;
    if (typeof text !== "string") return draw();
    store.add(conversation, turn.parent, { role: "user", text, attachments: turn.attachments });
    answer();
  },
  retry(turn) {
    if (running.has(conversation.id)) return;
    // An answer that says nothing is no version to go back to.
    if (turn.text || turn.calls?.length > 0) conversation.leaf = turn.parent;
    else {
      store.prune(conversation, turn);
      conversation.leaf = turn.parent;
    }
    answer();
  },
  resume: (turn) => answer(turn),
  remove(turn) {
    const before = { leaf: conversation.leaf, turns: { ...conversation.turns } };
    const changed = conversation;
    store.prune(conversation, turn);
    changedNow();
    $("question").focus();
    say("Deleted with what followed.", async () => {
      Object.assign(changed, before);
      await store.keep(changed);
      if (changed === conversation) draw();
      history.list();
    });
  },
  choose(turn, step) {
    const places = store.beside(conversation, turn);
    const other = places[places.indexOf(turn) + step];
    if (!other) return;
    conversation.leaf = store.newest(conversation, other.id);
    changedNow();
    messageOf(other)?.tools.querySelector(`[data-act="${step < 0 ? "previous" : "next"}"]:not(:disabled), [data-act]:not(:disabled)`)?.focus();
  },
  results(turn) {
    let parent = turn.id;
    for (const { id, name, result } of turn.calls) parent = store.add(conversation, parent, { role: "tool", call: id, name, text: result ?? "" }).id;
    answer();
  },
  redraw: () => draw(),
};

const messageOf = (turn) => views.get(turn.id);

function changedNow() {
  draw();
  keepNow(conversation);
}

async function keepNow(one) {
  if (forgotten.has(one.id)) return;
  if (Object.keys(one.turns).length === 0) await store.forget(one.id);
  else await store.keep(one);
  await history.list();
}

function draw() {
  const turns = store.path(conversation);
  const run = running.get(conversation.id);
  const shown = new Set(turns.map(({ id }) => id));
  const followed = isAtEnd();
  for (const [id, view] of views) {
    if (shown.has(id)) continue;
    view.node.remove();
    views.delete(id);
  }
  turns.forEach((turn, number) => {
    let view = views.get(turn.id);
    if (view?.turn !== turn) {
      view?.node.remove();
      view = new Message(turn, acts);
      views.set(turn.id, view);
    }
    const there = $("messages").children[number] ?? null;
    if (there !== view.node) $("messages").insertBefore(view.node, there);
    const places = store.beside(conversation, turn);
    view.update({
      isRunning: run?.turn === turn, isBusy: Boolean(run), isLast: number === turns.length - 1, number,
      place: places.indexOf(turn), places: places.length,
    });
  });
  $("empty").hidden = turns.length > 0;
  $("messages").hidden = turns.length === 0;
  $("chat-name").textContent = store.title(conversation);
  $("send").hidden = Boolean(run);
  $("stop").hidden = !run;
  $("messages").setAttribute("aria-busy", Boolean(run));
  if (followed) toEnd();
  showContext(turns);
}

// The answer that is coming, and nothing else.
function drawRunning(run) {
  if (running.get(conversation.id) !== run) return;
  const followed = isAtEnd();
  const turns = store.path(conversation);
  const places = store.beside(conversation, run.turn);
  messageOf(run.turn)?.update({
    isRunning: true, isBusy: true, isLast: true, number: turns.length - 1, place: places.indexOf(run.turn), places: places.length,
  });
  if (followed) toEnd();
}

// How much of the context the conversation took when it was last answered.
function showContext(turns = store.path(conversation)) {
  const usage = turns.findLast((turn) => turn.usage)?.usage;
  const most = chosen()?.max_model_len;
  $("context").hidden = !usage || !most;
  if (!usage || !most) return;
  const used = usage.prompt + usage.completion;
  $("context-words").textContent = `${count(used)} of ${count(most)} tokens`;
  $("context-meter").value = Math.min(1, used / most);
  $("context").classList.toggle("full", used / most >= NEARLY_FULL);
  $("context").title = used / most >= NEARLY_FULL ? "The context is nearly full: a new chat, or a shorter one, has room again." : "Tokens of this conversation, of the model's context";
}

// A turn as the API has it. Thoughts are not sent back: templates leave those of earlier answers out.
function asSaid({ role, text, calls, call, attachments }) {
  if (role === "tool") return { role, tool_call_id: call, content: text };
  if (!calls?.length) return { role, content: attachment.content(attachments ?? [], text) };
  const made = ({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } });
  return { role, content: text, tool_calls: calls.map(made) };
}

const messages = (one, leaf = one.leaf) => store.path(one, leaf)
  .filter((turn) => turn.text !== "" || turn.calls?.length > 0 || turn.attachments?.length > 0 || turn.role === "tool").map(asSaid);

const MISSES = {
  differs: ({ tokens }) => `cache: no earlier prompt goes on alike behind token ${count(tokens)}`,
  evicted: ({ tokens }) => `cache: ${count(tokens)} tokens were known, but their pages were needed for others`,
  whole: () => "cache: not used, as the prompt's own probabilities were asked for",
};

function figures({ usage, finish, first, last, began }) {
  const words = [];
  if (usage) {
    words.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && last > first) words.push(`${((usage.completion_tokens - 1) / (last - first) * 1000).toFixed(1)} tokens/s`);
    const { cached_tokens: cached = 0, cache_miss: miss } = usage.prompt_tokens_details ?? {};
    words.push(`prompt ${usage.prompt_tokens} tokens, ${cached} of them cached`);
    if (miss && MISSES[miss.reason]) words.push(MISSES[miss.reason](miss));
  }
  if (first) words.push(`first token after ${Math.round(first - began)} ms`);
  if (finish === "length") words.push("cut by the limit");
  if (finish === "stopped") words.push("stopped");
  return words.join(" · ");
}

// Whether everything that would be sent can be. What is wrong is said where the eye is, and nothing is sent.
function isSound() {
  const problem = settings.problem();
  complain(problem?.said ?? "");
  if (!problem) return true;
  if ($("parameters").hidden) settings.openSettings(true);
  $(problem.field).focus();
  return false;
}

// Answers what stands last; or goes on with an answer that is there.
async function answer(resumed) {
  const one = conversation;
  if (running.has(one.id)) return;
  if (!isSound()) return draw();
  const asked = { stream: true, stream_options: { include_usage: true }, ...settings.parameters() };
  const system = settings.system();
  const said = messages(one, resumed?.id ?? one.leaf);
  asked.messages = system ? [{ role: "system", content: system }, ...said] : said;
  if ($("model").value) asked.model = $("model").value;
  if (resumed) {
    asked.continue_final_message = true;
    delete asked.response_format;
    delete asked.tools;
  }
  const turn = resumed ?? store.add(one, one.leaf, { role: "assistant", text: "", thoughts: "", calls: [], model: asked.model ?? "", structured: settings.isStructured() });
  if (resumed) one.leaf = resumed.id;
  if (!resumed) turn.tokens = [];
  delete turn.error;
  delete turn.figures;
  turn.isOpen = true;
  const run = { turn, controller: new AbortController(), conversation: one };
  sessionStorage.setItem("conversation", one.id);
  running.set(one.id, run);
  draw();
  toEnd();
  keepNow(one);
  $("progress").textContent = "Answering";
  const state = { began: performance.now(), first: null, last: null, usage: null, finish: null };
  let kept = state.began;
  let timer = null;
  let cost = 0;
  const later = () => {
    timer ??= setTimeout(() => {
      timer = null;
      const at = performance.now();
      drawRunning(run);
      cost = performance.now() - at;
    }, Math.max(DRAW_EVERY, cost * 4));
  };
  try {
    for await (const part of stream("/v1/chat/completions", asked, run.controller.signal)) {
      state.usage = part.usage ?? state.usage;
      const [choice] = part.choices;
      if (!choice) continue;
      state.finish = choice.finish_reason ?? state.finish;
      for (const { token, logprob, top_logprobs: top } of choice.logprobs?.content ?? []) (turn.tokens ??= []).push({ token, logprob, top });
      const { content, reasoning_content: thought, tool_calls: called } = choice.delta ?? {};
      if (!content && !thought && !called) continue;
      state.last = performance.now();
      state.first ??= state.last;
      turn.text += content ?? "";
      turn.thoughts = (turn.thoughts ?? "") + (thought ?? "");
      for (const { index, id, function: made } of called ?? []) {
        const call = (turn.calls[index] ??= { id: "", name: "", arguments: "" });
        call.id = id ?? call.id;
        call.name += made?.name ?? "";
        call.arguments += made?.arguments ?? "";
      }
      later();
      if (state.last - kept > KEEP_EVERY) {
        kept = state.last;
        if (!forgotten.has(one.id)) store.keep(one);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") state.finish = "stopped";
    else if (error instanceof Gone) turn.error = turn.text ? `${error.message} What arrived is kept.` : error.message;
    else turn.error = error.message;
  }
  clearTimeout(timer);
  running.delete(one.id);
  delete turn.isOpen;
  turn.finish = state.finish ?? "";
  turn.figures = figures(state);
  if (state.usage) turn.usage = { prompt: state.usage.prompt_tokens, completion: state.usage.completion_tokens };
  // Probabilities of a part would not be those of the whole.
  if (resumed) turn.tokens = [];
  one.updated = Date.now();
  if (one === conversation) {
    $("progress").textContent = turn.error ? "The answer failed" : state.finish === "stopped" ? "Stopped" : "The answer is complete";
    draw();
  }
  await keepNow(one);
}

function ask(text) {
  if (running.has(conversation.id) || (text.trim() === "" && attached.length === 0)) return;
  // What is wrong leaves the question where it was typed.
  if (!isSound()) return;
  $("question").value = "";
  store.add(conversation, conversation.leaf, { role: "user", text, ...(attached.length > 0 ? { attachments: attached } : {}) });
  attached = [];
  showAttached();
  answer();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask($("question").value);
});
$("question").addEventListener("input", () => complain(""));
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  } else if (event.key === "ArrowUp" && $("question").value === "" && !running.has(conversation.id)) {
    const last = store.path(conversation).findLast((turn) => turn.role === "user");
    if (!last) return;
    event.preventDefault();
    acts.edit(last);
  }
});

const stop = () => running.get(conversation.id)?.controller.abort();
$("stop").addEventListener("click", () => {
  stop();
  $("question").focus();
});

// Files.

async function attach(files) {
  complain("");
  for (const file of files) {
    try {
      const read = await attachment.read(file);
      attached = [...attached, read];
    } catch (error) {
      complain(`${file.name}: ${error.message}`);
    }
  }
  showAttached();
  $("question").focus();
}

function showAttached() {
  $("attached").replaceChildren(...attached.map((file, index) => element("li", {}, ...(file.image ? [attachment.thumbnail(file)] : []), element("span", { textContent: attachment.words(file) }),
    iconButton("close", `Take ${file.name} away`, () => {
      attached = attached.filter((_, other) => other !== index);
      showAttached();
      $("question").focus();
    }))));
}

$("attach").addEventListener("click", () => $("attach-files").click());
$("attach-files").addEventListener("change", async () => {
  await attach([...$("attach-files").files]);
  $("attach-files").value = "";
});
$("question").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length === 0) return;
  event.preventDefault();
  attach([...event.clipboardData.files]);
});
for (const name of ["dragover", "drop"]) {
  $("chat").addEventListener(name, (event) => {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    if (name === "drop") attach([...event.dataTransfer.files]);
  });
}

// Conversations.

const narrow = matchMedia("(max-width: 60rem)");

function showSide(isShown) {
  $("chat").classList.toggle("without-side", !isShown);
  $("show-side").setAttribute("aria-expanded", isShown);
  if (!narrow.matches) localStorage.setItem("side", isShown ? "" : "hidden");
}

function turnTo(one) {
  conversation = one;
  sessionStorage.setItem("conversation", one.id);
  views.clear();
  $("messages").replaceChildren();
  $("progress").textContent = "";
  complain("");
  draw();
  toEnd();
  history.list();
}

async function open(id) {
  const here = running.get(id)?.conversation ?? (await store.all()).find((one) => one.id === id);
  if (!here) return;
  // Deletion was undone.
  if (!running.has(id)) forgotten.delete(id);
  for (const turn of Object.values(here.turns)) {
    if (!turn.isOpen || running.has(id)) continue;
    delete turn.isOpen;
    turn.error = "The page was closed before the answer was whole. What arrived is kept.";
  }
  if (narrow.matches) showSide(false);
  turnTo(here);
  $("question").focus();
}

function begin() {
  if (narrow.matches) showSide(false);
  turnTo(store.newConversation());
  $("question").focus();
}

function forget(id) {
  if (!running.has(id)) return;
  forgotten.add(id);
  running.get(id).controller.abort();
}

const inUse = (id) => (id === conversation.id ? conversation : running.get(id)?.conversation);

const ready = history.start({
  current: () => conversation, open, begin, messages, complain,
  async change(id, how) {
    const one = inUse(id) ?? (await store.all()).find((other) => other.id === id);
    how(one);
    await store.keep(one);
    if (one === conversation) draw();
  },
  async remove(id) {
    forget(id);
    await store.forget(id);
    if (id === conversation.id) begin();
  },
  async removeAll() {
    for (const id of running.keys()) forget(id);
    await store.forgetAll();
    begin();
  },
});

$("show-side").addEventListener("click", () => showSide($("chat").classList.contains("without-side")));
showSide(!narrow.matches && localStorage.getItem("side") !== "hidden");
narrow.addEventListener("change", () => showSide(!narrow.matches && localStorage.getItem("side") !== "hidden"));
// Beside an open list on a phone, whatever is behind it closes it.
document.querySelector(".talk").addEventListener("pointerdown", (event) => {
  if (narrow.matches && !$("chat").classList.contains("without-side") && !event.target.closest("#show-side")) showSide(false);
});

// Another tab may have added some.
window.addEventListener("focus", () => history.list());

// What to begin with.

const SUGGESTIONS = [
  ["Explain something", "Why is the sky blue? Answer in three sentences."],
  ["Write code", "Write a Python function that tells whether a word is a palindrome, with two tests."],
  ["Compare", "Compare tea and coffee in a table: taste, caffeine, how to make it."],
  ["Ask about a file", null],
];
$("suggestions").append(...SUGGESTIONS.map(([name, text]) => element("button", {
  type: "button",
  onclick: () => (text === null ? $("attach-files").click() : ask(text)),
}, element("strong", { textContent: name }), element("span", { textContent: text ?? "Attach a text file or an image and ask what is in it." }))));

document.addEventListener("model", () => {
  const model = chosen();
  const state = model && model.state !== "loaded" ? (model.state === "loading" ? ", loading" : ", loaded by the first question") : "";
  $("empty-model").textContent = model ? `${model.id}, ${count(model.max_model_len)} tokens of context${state}` : "";
  $("models").hidden = !model;
  showContext();
});

// Keys.

scroller.addEventListener("scroll", () => ($("to-end").hidden = isAtEnd()), { passive: true });
$("to-end").addEventListener("click", toEnd);
for (const [show, hide, dialog] of [["show-keys", "hide-keys", "keys-dialog"]]) {
  $(show).addEventListener("click", () => $(dialog).showModal());
  $(hide).addEventListener("click", () => $(dialog).close());
}

const KEYS = {
  "c-b": () => showSide($("chat").classList.contains("without-side")),
  "c-k": () => {
    showSide(true);
    $("search").select();
  },
  "c-,": () => settings.openSettings($("parameters").hidden),
  "c-/": () => ($("keys-dialog").open ? $("keys-dialog").close() : $("keys-dialog").showModal()),
  "c-s-o": begin,
  "c-s-l": () => {
    const last = store.path(conversation).findLast((turn) => turn.role === "assistant");
    if (last) copy(last.text);
  },
  "s-escape": () => $("question").focus(),
  escape: () => {
    if (narrow.matches && !$("parameters").hidden) settings.openSettings(false);
    else if (narrow.matches && !$("chat").classList.contains("without-side")) showSide(false);
    else stop();
  },
};
document.addEventListener("keydown", (event) => {
  if ($("chat").hidden || event.altKey || event.isComposing) return;
  const name = `${event.ctrlKey || event.metaKey ? "c-" : ""}${event.shiftKey ? "s-" : ""}${event.key.toLowerCase()}`;
  const act = Object.hasOwn(KEYS, name) ? KEYS[name] : null;
  if (!act || (document.querySelector("dialog[open]") && name !== "c-/")) return;
  event.preventDefault();
  act();
});

// What was open in this tab is open again.
ready.then(async () => {
  const last = sessionStorage.getItem("conversation");
  if (last) await open(last);
  draw();
});

export { listModels };
