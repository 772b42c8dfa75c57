// The engine as it stands: looked at once a second while somebody looks.
import { get, getText } from "./api.js";

const $ = (id) => document.getElementById(id);
const EVERY = 1000;
// The last look, for what is per second.
let before = null;
let shown = null;

const amount = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${units[unit]}`;
};
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

function facts(live) {
  const seconds = before ? (live.at - before.at) / 1000 : 0;
  const rate = (now, then) => (seconds > 0 && now >= then ? ((now - then) / seconds).toFixed(1) : "–");
  const counts = live.counts ?? {};
  const then = before?.counts ?? counts;
  const hits = counts.prefix_queries ? `${(counts.prefix_hits / counts.prefix_queries * 100).toFixed(0)} %` : "–";
  const list = [
    ["Model", live.model ?? "–"], ["Architecture", live.architecture ?? "–"], ["Weights", live.quant ?? "–"],
    ["Context", live.context ? `${live.context} tokens` : "–"], ["Running", live.running ?? 0], ["Waiting", live.waiting ?? 0],
    ["Tokens/s", rate(counts.generated_tokens, then.generated_tokens)], ["Prompt tokens/s", rate(counts.prompt_tokens, then.prompt_tokens)],
    ["Prefix found in the cache", hits], ["Preempted", counts.preemptions ?? 0], ["Up", time(live.uptime)], ["Version", live.version],
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
    const columns = Math.min(128, Math.max(1, group.pages_total));
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
  const more = (live.running ?? 0) + (live.waiting ?? 0) - list.length;
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

function errors(metrics) {
  const lines = metrics.split("\n").filter((line) => line.startsWith("fornax_failures_total{"));
  const counts = lines.map((line) => [[/code="([^"]+)"/.exec(line)[1]], [line.slice(line.lastIndexOf(" ") + 1), "number"]]);
  rows($("errors"), counts);
  $("no-errors").hidden = counts.length > 0;
}

// Where there are several models one is chosen to be looked at; until then it is the first that is loaded.
const picker = $("watched-model");
let models = "";

function chooser(live) {
  $("watched").hidden = (live.models ?? []).length < 2;
  const words = (live.models ?? []).map(({ id, state }) => [id, `${id} (${state})`]);
  if (models !== JSON.stringify(words)) {
    models = JSON.stringify(words);
    const chosen = picker.value;
    const option = ([value, textContent]) => Object.assign(document.createElement("option"), { value, textContent });
    picker.replaceChildren(...[["", "the first that is loaded"], ...words].map(option));
    picker.value = words.some(([id]) => id === chosen) ? chosen : "";
  }
}
picker.addEventListener("change", () => {
  // What was of another model says nothing of this one's speed.
  before = null;
  lookNow();
});

function status(live) {
  $("status").textContent = live.model ? `${live.status}: ${live.model}` : live.status;
  $("loading").hidden = !live.loading;
  if (live.loading) {
    const { stage, bytes, bytes_total: total } = live.loading;
    $("loading-stage").textContent = total > 0 ? `${stage}, ${amount(bytes)} of ${amount(total)}` : stage;
    if (total > 0) Object.assign($("loading-bar"), { max: total, value: bytes });
    else $("loading-bar").removeAttribute("value");
  }
}

async function look() {
  const watched = !$("engine").hidden;
  try {
    const model = picker.value;
    const live = { at: performance.now(), ...await get(`/console/live${model && `?model=${encodeURIComponent(model)}`}`) };
    // Another one was chosen meanwhile.
    if (model !== picker.value) return live;
    status(live);
    chooser(live);
    $("engine-error").textContent = live.error ?? "";
    if (!watched) return live;
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
    $("status").textContent = "the server does not answer";
    $("engine-error").textContent = error.message;
    return null;
  }
}

// Looks for as long as the page is open, seldom while nobody sees it; `loaded` is called when a model is.
export async function watch(loaded) {
  let known = null;
  for (;;) {
    if (!document.hidden) {
      const live = await look();
      if (live?.status === "ready" && live.model && live.model !== known) {
        known = live.model;
        loaded();
      }
    }
    const pause = $("engine").hidden ? EVERY * 5 : EVERY;
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, known === null ? EVERY : pause);
    });
  }
}

let wake = () => {};
// A view that was just opened shows the present at once.
export const lookNow = () => wake();
document.addEventListener("theme", () => shown && pages(shown));
