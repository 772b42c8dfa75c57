// Durable jobs: the queue, each job, its timeline and its result; submitting, cancelling, trying again.
import { get, send } from "./api.js";
import { $, row } from "./dom.js";
import "./theme.js";

let chosen = null;

const ask = (path) => get(`/v2/default/${path}`);
const seconds = (ms) => (ms == null ? "" : `${(ms / 1000).toFixed(2)} s`);

// Everything from the server is shown as text, never as markup.
async function show() {
  try {
    const { jobs: counts } = await ask("health");
    $("status").textContent = "";
    $("counts").className = "";
    $("counts").textContent = `${counts.inQueue} wait, ${counts.inProgress} are computed, ${counts.completed} completed, ` +
      `${counts.failed} failed, ${counts.retried} needed more than one attempt`;
    const state = $("state").value;
    const { jobs } = await ask(`jobs?limit=50${state && `&status=${state}`}`);
    const focused = document.activeElement?.dataset.id;
    $("jobs").replaceChildren(...jobs.map((job) => {
      const line = row([[job.id.slice(0, 12), "mono"], [job.status, job.status], new Date(job.created).toLocaleString(), seconds(job.delayTime),
        seconds(job.executionTime), String(job.attempts), job.error]);
      line.dataset.id = job.id;
      line.tabIndex = 0;
      if (job.id === chosen) line.dataset.chosen = "";
      return line;
    }));
    $("no-jobs").hidden = jobs.length > 0;
    // What was under the fingers stays there.
    if (focused) document.querySelector(`tr[data-id="${focused}"]`)?.focus();
    if (chosen) await showOne(chosen);
  } catch (error) {
    $("counts").className = "error";
    $("counts").textContent = error.message;
  }
}

async function showOne(id) {
  const [{ events }, status] = await Promise.all([ask(`timeline/${id}`), ask(`status/${id}`)]);
  // Another was chosen meanwhile.
  if (id !== chosen) return;
  $("id").textContent = id;
  $("events").replaceChildren(...events.map((event) => row([new Date(event.at).toLocaleString(), event.event, String(event.attempt ?? ""), event.detail])));
  const { items } = status;
  $("items").hidden = !items;
  if (items) {
    $("items-words").textContent = `${items.done} of ${items.total} items are done`;
    Object.assign($("items-bar"), { max: items.total, value: items.done });
  }
  $("cancel").disabled = !["IN_QUEUE", "IN_PROGRESS"].includes(status.status);
  $("retry").disabled = !["FAILED", "TIMED_OUT"].includes(status.status);
  const text = JSON.stringify(status.output ?? status, null, 2);
  // What is selected there stays selected.
  if ($("result").textContent !== text) $("result").textContent = text;
  $("one").hidden = false;
}

function choose(event) {
  const line = event.target.closest("tr[data-id]");
  if (line && (event.type === "click" || event.key === "Enter")) {
    chosen = line.dataset.id;
    $("one-error").textContent = "";
    show();
  }
}
$("jobs").addEventListener("click", choose);
$("jobs").addEventListener("keydown", choose);
$("state").addEventListener("change", show);

for (const act of ["cancel", "retry"]) {
  $(act).addEventListener("click", async () => {
    $("one-error").textContent = "";
    try {
      await send(`/v2/default/${act}/${chosen}`);
    } catch (error) {
      $("one-error").textContent = error.message;
    }
    show();
  });
}

// Submitting.

function kind() {
  for (const part of document.querySelectorAll("[data-kind]")) part.hidden = !part.dataset.kind.split(" ").includes($("kind").value);
}
$("kind").addEventListener("change", kind);

function json(id, what) {
  try {
    return JSON.parse($(id).value);
  } catch (error) {
    $(id).focus();
    throw new Error(`${what} is no JSON: ${error.message}`);
  }
}

function filled(id, what) {
  const text = $(id).value.trim();
  if (text !== "") return text;
  $(id).focus();
  throw new Error(`${what} is missing`);
}

function input() {
  if ($("kind").value === "json") return json("job-input", "The input");
  const number = (id) => ($(id).value === "" ? {} : Number($(id).value));
  const [temperature, most] = [number("job-temperature"), number("job-max")];
  const common = {
    ...(typeof temperature === "number" ? { temperature } : {}), ...(typeof most === "number" ? { max_tokens: most } : {}),
    ...($("job-schema").value.trim() === "" ? {} : { schema: json("job-schema", "The schema") }),
  };
  if ($("kind").value === "chat") return { messages: [{ role: "user", content: filled("job-question", "The question") }], ...common };
  const texts = filled("job-items", "A text").split("\n").filter((line) => line.trim() !== "");
  return { shared_prefix: filled("job-prefix", "What to do"), items: texts.map((text, index) => ({ id: String(index + 1), text })), ...common };
}

$("submit").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("submit-error").textContent = "";
  try {
    const { id } = await send("/v2/default/run", { input: input() });
    chosen = id;
    await show();
    document.querySelector(`tr[data-id="${id}"]`)?.focus();
  } catch (error) {
    $("submit-error").textContent = error.message;
  }
});

kind();
document.querySelector("nav a[data-view=jobs]").setAttribute("aria-current", "page");
for (;;) {
  if (!document.hidden) await show();
  await new Promise((resolve) => setTimeout(resolve, 2000));
}
