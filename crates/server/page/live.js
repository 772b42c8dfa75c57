// The engine as it stands: looked at once a second while somebody looks.
import { get, getText } from "./api.js";
import { $, amount, element } from "./dom.js";

const EVERY = 1000;
// Requests that the server lists at most.
const LISTED_MAX = 256;
// The last look, for what is per second.
let before = null;
let shown = null;

const time = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`);

function cells(row, values) {
  values.forEach(([value, kind]) => {
    const cell = row.insertCell();
    if (kind) cell.className = kind;
    cell.append(value);
  });
  return row;
}

function rows(table, lines) {
  const body = table.tBodies[0];
  body.replaceChildren(...lines.map((values) => cells(document.createElement("tr"), values)));
}

// Counts are those of the list where it is whole: both are of the same moment then.
function standing(live) {
  const list = live.requests ?? [];
  if (list.length >= LISTED_MAX || list.length === 0) return { running: live.running ?? 0, waiting: live.waiting ?? 0 };
  const running = list.filter(({ state }) => state === "running").length;
  return { running, waiting: list.length - running };
}

function facts(live) {
  const { running, waiting } = standing(live);
  const seconds = before ? (live.at - before.at) / 1000 : 0;
  const rate = (now, then) => (seconds > 0 && now >= then ? ((now - then) / seconds).toFixed(1) : "–");
  const counts = live.counts ?? {};
  const then = before?.counts ?? counts;
  const hits = counts.prefix_queries ? `${(counts.prefix_hits / counts.prefix_queries * 100).toFixed(0)} %` : "–";
  const list = [
    ["Model", live.model ?? "–"], ["Architecture", live.architecture ?? "–"], ["Weights", live.quant ?? "–"],
    ["Context", live.context ? `${live.context} tokens` : "–"], ["Running", running], ["Waiting", waiting],
    ["Tokens/s", rate(counts.generated_tokens, then.generated_tokens)], ["Prompt tokens/s", rate(counts.prompt_tokens, then.prompt_tokens)],
    ["Prefix cache hits", hits], ["Preempted", counts.preemptions ?? 0], ["Up", time(live.uptime)], ["Version", live.version],
  ];
  $("facts").replaceChildren(...list.map(([name, value]) => {
    const pair = document.createElement("div");
    const [term, words] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    words.textContent = value;
    words.dataset.fact = name;
    pair.append(term, words);
    return pair;
  }));
}

function memory(live) {
  const lines = (live.devices ?? []).flatMap((device, index) => {
    const planned = live.plan?.devices?.[index]?.bytes ?? {};
    const largest = Math.max(1, ...Object.values(planned), ...Object.values(device.bytes));
    const purposes = Object.keys(device.bytes).filter((purpose) => device.bytes[purpose] > 0 || planned[purpose] > 0);
    return purposes.map((purpose) => {
      const meter = document.createElement("meter");
      Object.assign(meter, { min: 0, max: largest, value: device.bytes[purpose] });
      meter.setAttribute("aria-label", `${purpose} on ${device.name}: ${amount(device.bytes[purpose])}`);
      return [[device.name], [purpose], [amount(planned[purpose] ?? 0), "number"], [amount(device.bytes[purpose]), "number"], [meter]];
    });
  });
  rows($("memory"), lines);
}

const COLOURS = { f: "--free", c: "--cached", h: "--held", s: "--shared" };

// Runs of equal pages: a letter and how many.
function* runs(map) {
  for (const [, state, count] of map.matchAll(/([fchs])(\d+)/g)) yield [state, Number(count)];
}

function pages(live) {
  const groups = live.kv ?? [];
  const sum = (field) => groups.reduce((total, group) => total + group[field], 0);
  $("pages-words").textContent = groups.length === 0 ? "No model is loaded."
    : `${sum("pages_used")} of ${sum("pages_total")} pages of ${live.page_tokens} tokens are held, ${sum("pages_cached")} are kept for prompts that begin alike.`;
  const style = getComputedStyle(document.documentElement);
  const host = $("pages");
  while (host.children.length > groups.length) host.lastChild.remove();
  groups.forEach((group, index) => {
    const canvas = host.children[index] ?? host.appendChild(document.createElement("canvas"));
    // On a phone in more lines, so that each page is still seen.
    const wide = Math.max(32, Math.min(128, Math.floor(host.clientWidth / 8)));
    const columns = Math.min(wide, Math.max(1, group.pages_total));
    const cell = Math.max(2, Math.min(16, Math.floor(1024 / columns)));
    canvas.width = columns * cell;
    canvas.height = Math.max(1, Math.ceil(group.pages_total / columns)) * cell;
    const free = group.pages_total - group.pages_used - group.pages_cached;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Pages of KV group ${index}: ${group.pages_used} held, ${group.pages_cached} cached, ${free} free`);
    const context = canvas.getContext("2d");
    context.fillStyle = style.getPropertyValue("--ground");
    context.fillRect(0, 0, canvas.width, canvas.height);
    let page = 0;
    for (const [state, count] of runs(group.map)) {
      context.fillStyle = style.getPropertyValue(COLOURS[state]);
      for (const end = page + count; page < end; page += 1) {
        context.fillRect((page % columns) * cell, Math.floor(page / columns) * cell, cell - 1, cell - 1);
      }
    }
  });
}

function requests(live) {
  const list = live.requests ?? [];
  const more = list.length >= LISTED_MAX ? (live.running ?? 0) + (live.waiting ?? 0) - list.length : 0;
  $("requests-words").textContent = list.length === 0 ? "Nobody asks for anything." : more > 0 ? `${more} more are not shown.` : "";
  const seconds = before ? (live.at - before.at) / 1000 : 0;
  rows($("requests"), list.map((one) => {
    const then = before?.requests?.find((other) => other.id === one.id);
    const rate = then && seconds > 0 ? ((one.tokens - then.tokens) / seconds).toFixed(1) : "–";
    return [[one.id, "mono"], [one.state], [one.prompt_tokens, "number"], [one.cached_tokens, "number"], [one.computed_tokens, "number"],
      [`${one.tokens} of ${one.tokens_max}`, "number"], [rate, "number"]];
  }));
}

const HISTOGRAMS = [
  ["vllm:time_to_first_token_seconds", "To the first token"], ["vllm:inter_token_latency_seconds", "Between tokens"],
  ["vllm:e2e_request_latency_seconds", "Whole answers"], ["vllm:request_queue_time_seconds", "Waiting for a seat"],
];

// Buckets [upper bound, count] of one metric for the model that is looked at.
function buckets(metrics, name, model) {
  const sums = new Map();
  for (const line of metrics.split("\n")) {
    if (!line.startsWith(`${name}_bucket{`) || !line.includes(`model_name=${JSON.stringify(model)}`)) continue;
    const [, bound] = /le="([^"]+)"/.exec(line);
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    const limit = bound === "+Inf" ? Infinity : Number(bound);
    sums.set(limit, (sums.get(limit) ?? 0) + value);
  }
  let last = 0;
  return [...sums].sort(([a], [b]) => a - b).map(([limit, sum]) => {
    const count = sum - last;
    last = sum;
    return [limit, count];
  });
}

function chart(metrics, [name, title], model) {
  const counts = buckets(metrics, name, model);
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  const below = (share) => {
    let sum = 0;
    const found = counts.find(([, count]) => (sum += count) >= total * share);
    return found[0] === Infinity ? `beyond ${time(counts.at(-2)[0])}` : `within ${time(found[0])}`;
  };
  const words = total === 0 ? "nothing measured yet" : `${total} measured, half ${below(0.5)}, 95 % ${below(0.95)}`;
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = `${title}: ${words}`;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, counts.length) * 10} 60`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const most = Math.max(1, ...counts.map(([, count]) => count));
  counts.forEach(([limit, count], index) => {
    const height = count / most * 58;
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [key, value] of Object.entries({ x: index * 10 + 1, y: 60 - height, width: 8, height })) bar.setAttribute(key, value);
    const tip = document.createElementNS("http://www.w3.org/2000/svg", "title");
    tip.textContent = `up to ${limit === Infinity ? "for ever" : time(limit)}: ${count}`;
    bar.append(tip);
    svg.append(bar);
  });
  figure.append(svg, caption);
  return figure;
}

// What the codes mean to whoever looks here, and what can be done.
const MEANINGS = {
  INVALID_INPUT: "A field of the request was wrong; its answer names it.",
  PROMPT_TOO_LONG: "The prompt did not fit into the context.",
  context_length_exceeded: "The prompt did not fit into the context.",
  SCHEMA_UNSUPPORTED: "A schema or grammar cannot be followed exactly.",
  MODEL_UNSUPPORTED: "The model cannot do what was asked.",
  MODEL_NOT_FOUND: "A model was asked for that is not served here.",
  UNAUTHORIZED: "A key was missing or wrong.",
  UNKNOWN_ENDPOINT: "There is nothing at the path.",
  BODY_TOO_LARGE: "A body was larger than --max-body.",
  QUEUE_FULL: "Too much waited: more --parallel, or fewer callers.",
  MODEL_NOT_READY: "A model was still loading, or the server ends.",
  MODEL_DOES_NOT_FIT: "A model found no room beside those in use.",
  OUT_OF_MEMORY: "Too little memory was left.",
  EXECUTION_TIMEOUT: "An answer took longer than --request-timeout.",
  DEVICE_LOST: "The device is gone: start the server again.",
  DEVICE_UNAVAILABLE: "The device cannot be used.",
  CANCELLED: "The client left, or the server stopped first.",
  OUTPUT_TRUNCATED: "An answer was cut before its form was complete.",
  NUMERIC_FAULT: "A computation gave no numbers.",
  INTERNAL: "A fault of the server: its log says more.",
};
// When each code was last seen to grow, and how often it had come by then.
const seen = new Map();

function errors(metrics) {
  const lines = metrics.split("\n").filter((line) => line.startsWith("fornax_failures_total{"));
  const sums = new Map();
  for (const line of lines) {
    const [, code] = /code="([^"]+)"/.exec(line);
    sums.set(code, (sums.get(code) ?? 0) + Number(line.slice(line.lastIndexOf(" ") + 1)));
  }
  const isFirst = seen.size === 0 && !errors.wasCalled;
  errors.wasCalled = true;
  const counts = [...sums].map(([code, sum]) => {
    const known = seen.get(code);
    if (known?.sum !== sum) seen.set(code, { sum, at: isFirst ? null : new Date() });
    const { at } = seen.get(code);
    return [[code, "mono"], [sum, "number"], [at ? at.toLocaleTimeString() : "before this page"], [MEANINGS[code] ?? ""]];
  });
  rows($("errors"), counts);
  $("errors").hidden = counts.length === 0;
  $("no-errors").hidden = counts.length > 0;
}

// Where there are several models one is chosen to be looked at; until then it is the one that has most to do.
const picker = $("watched-model");
let models = "";
let busiest = "";

function chooser(live) {
  const all = live.models ?? [];
  $("watched").hidden = all.length < 2;
  const words = all.map(({ id, state }) => [id, `${id} (${state})`]);
  if (models !== JSON.stringify(words)) {
    models = JSON.stringify(words);
    const chosen = picker.value;
    const option = ([value, textContent]) => element("option", { value, textContent });
    picker.replaceChildren(...[["", "the busiest"], ...words].map(option));
    picker.value = words.some(([id]) => id === chosen) ? chosen : "";
  }
  const load = ({ running = 0, waiting = 0 }) => running + waiting;
  const most = all.reduce((best, one) => (load(one) > load(best ?? {}) ? one : best), null);
  // It stays with the one that was busy last.
  if (most) busiest = most.id;
  else if (all.find(({ id }) => id === busiest)?.state !== "loaded") busiest = "";
  const sum = (field) => all.reduce((total, one) => total + (one[field] ?? 0), 0);
  $("totals").hidden = all.length < 2;
  $("totals").textContent = `All models together: ${sum("running")} running, ${sum("waiting")} waiting.`;
}
picker.addEventListener("change", () => {
  // What was of another model says nothing of this one's speed.
  before = null;
  lookNow();
});

// What failed: the server, the model that is looked at, or another.
function failures(live) {
  const failed = (live.models ?? []).filter(({ error }) => error).map(({ id, error }) => `${id}: ${error}`);
  $("engine-error").textContent = [live.error, ...failed.filter((line) => !live.error || !line.endsWith(live.error))].filter(Boolean).join(" ");
}

function status(live, isWatched) {
  const model = isWatched ? live.model : null;
  const line = $("status");
  line.textContent = model ? `${live.status}: ${model}` : live.status;
  line.dataset.state = live.status;
  $("loading").hidden = !live.loading;
  if (live.loading) {
    const { stage, bytes, bytes_total: total } = live.loading;
    const words = total > 0 ? `${stage}, ${amount(bytes)} of ${amount(total)}` : stage;
    $("loading-stage").textContent = words;
    if (!isWatched) line.textContent = `${live.status}: ${words}`;
    if (total > 0) Object.assign($("loading-bar"), { max: total, value: bytes });
    else $("loading-bar").removeAttribute("value");
  }
}

async function look() {
  const isWatched = !$("engine").hidden;
  try {
    const picked = picker.value;
    const model = picked || busiest;
    const live = { at: performance.now(), ...await get(`/console/live${model && `?model=${encodeURIComponent(model)}`}`) };
    // Another one was chosen meanwhile.
    if (picked !== picker.value) return live;
    const followed = busiest;
    status(live, isWatched);
    chooser(live);
    failures(live);
    if (!isWatched) return live;
    // Another one has become the busiest: it is looked at next, at once.
    if (!picked && busiest !== followed && busiest !== live.model) {
      before = null;
      queueMicrotask(lookNow);
      return live;
    }
    if (before && before.model !== live.model) before = null;
    facts(live);
    memory(live);
    pages(live);
    requests(live);
    [before, shown] = [live, live];
    const metrics = await getText("/metrics");
    $("latency").replaceChildren(...HISTOGRAMS.map((histogram) => chart(metrics, histogram, live.model ?? picker.value)));
    errors(metrics);
    return live;
  } catch (error) {
    $("status").textContent = error.code === "MODEL_NOT_FOUND" ? "ready" : "no answer";
    $("status").dataset.state = "gone";
    $("engine-error").textContent = error.message;
    busiest = "";
    return null;
  }
}

// Looks for as long as the page is open, seldom while nobody sees it; `changed` is called when models come or go.
export async function watch(changed) {
  let known = null;
  let wasThere = true;
  for (;;) {
    if (!document.hidden) {
      const live = await look();
      const now = live && JSON.stringify([live.status, live.models?.map(({ id, state }) => [id, state])]);
      if (live?.status === "ready" && now !== known) {
        known = now;
        changed();
      }
      wasThere = live !== null;
    }
    // A server that is away is looked for more often.
    const pause = $("engine").hidden && wasThere && known !== null ? EVERY * 5 : EVERY;
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, pause);
    });
  }
}

let wake = () => {};
// A view that was just opened shows the present at once.
export const lookNow = () => wake();
document.addEventListener("theme", () => shown && pages(shown));
