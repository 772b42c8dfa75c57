// Durable jobs: the queue, each job, its timeline and its result.
import { get } from "./api.js";
import "./theme.js";

const $ = (id) => document.getElementById(id);
let chosen = null;

// Everything from the server is shown as text, never as markup.
function row(cells, kind) {
  const row = document.createElement("tr");
  cells.forEach((cell, index) => {
    const td = row.insertCell();
    td.textContent = cell ?? "";
    if (index === 1 && kind) td.className = kind;
  });
  return row;
}

const ask = (path) => get(`/v2/default/${path}`);
const seconds = (ms) => (ms == null ? "" : `${(ms / 1000).toFixed(2)} s`);

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
      const line = row([job.id.slice(0, 12), job.status, new Date(job.created).toLocaleString(), seconds(job.delayTime),
        seconds(job.executionTime), job.attempts, job.error], job.status);
      line.dataset.id = job.id;
      line.tabIndex = 0;
      if (job.id === chosen) line.dataset.chosen = "";
      return line;
    }));
    // What was under the fingers stays there.
    if (focused) document.querySelector(`tr[data-id="${focused}"]`)?.focus();
    if (chosen) {
      const [{ events }, status] = await Promise.all([ask(`timeline/${chosen}`), ask(`status/${chosen}`)]);
      $("id").textContent = chosen;
      $("events").replaceChildren(...events.map((event) =>
        row([new Date(event.at).toLocaleString(), event.event, event.attempt, event.detail])));
      $("result").textContent = JSON.stringify(status.output ?? status, null, 2);
      $("one").hidden = false;
    }
  } catch (error) {
    $("counts").className = "error";
    $("counts").textContent = error.message;
  }
}

function choose(event) {
  const line = event.target.closest("tr[data-id]");
  if (line && (event.type === "click" || event.key === "Enter")) {
    chosen = line.dataset.id;
    show();
  }
}
$("jobs").addEventListener("click", choose);
$("jobs").addEventListener("keydown", choose);
$("state").addEventListener("change", show);
document.querySelector("nav a[data-view=jobs]").setAttribute("aria-current", "page");
for (;;) {
  if (!document.hidden) await show();
  await new Promise((resolve) => setTimeout(resolve, 2000));
}
