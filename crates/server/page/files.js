// Files and batches: sent, started, followed, cancelled, and their answers fetched.
import { get, getText, send } from "./api.js";
import { $, amount, button, download, element, row } from "./dom.js";
import "./theme.js";

const when = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "");

async function attempt(place, act) {
  $(place).textContent = "";
  try {
    await act();
  } catch (error) {
    $(place).textContent = error.message;
  }
  await show();
}

const save = (id, name) => attempt("page-error", async () => download(name, await getText(`/v1/files/${id}/content`), "application/jsonl"));

function batch(one) {
  const { total, completed, failed } = one.request_counts;
  const done = element("span", {}, `${completed} of ${total} answered${failed > 0 ? `, ${failed} failed` : ""} `);
  if (total > 0) done.append(element("progress", { max: total, value: completed + failed, "aria-label": `${one.id}: ${completed + failed} of ${total}` }));
  const wrong = (one.errors?.data ?? []).slice(0, 5).map((error) => element("p", { className: "error", textContent: `${error.line ? `line ${error.line}: ` : ""}${error.message}` }));
  const results = element("span", { className: "buttons" });
  if (one.output_file_id) results.append(button("Answers", () => save(one.output_file_id, `${one.id}-output.jsonl`), { className: "small", "aria-label": `Answers of ${one.id}` }));
  if (one.error_file_id) results.append(button("Errors", () => save(one.error_file_id, `${one.id}-errors.jsonl`), { className: "small", "aria-label": `Errors of ${one.id}` }));
  const act = one.status === "in_progress"
    ? button("Cancel", () => attempt("page-error", () => send(`/v1/batches/${one.id}/cancel`)), { className: "small", "aria-label": `Cancel ${one.id}` }) : "";
  const line = row([[element("span", { textContent: `${one.id.slice(0, 16)}…`, title: one.id }), "mono"], [one.status, one.status === "completed" ? "COMPLETED" : ["failed", "expired"].includes(one.status) ? "FAILED" : ""],
    when(one.created_at), element("div", {}, done, ...wrong), results, act]);
  line.dataset.id = one.id;
  return line;
}

function file(one) {
  const acts = element("span", { className: "buttons" },
    button("Download", () => save(one.id, one.filename), { className: "small", "aria-label": `Download ${one.filename}` }),
    button("Delete", () => attempt("page-error", () => send(`/v1/files/${one.id}`, undefined, "DELETE")), { className: "small", "aria-label": `Delete ${one.filename}` }));
  const line = row([element("span", { className: "broken", textContent: one.filename }), one.purpose, [amount(one.bytes), "number"], when(one.created_at), when(one.expires_at), acts]);
  line.dataset.id = one.id;
  return line;
}

let seen = "";
let isAway = false;

function put(files, batches) {
  $("files").replaceChildren(...files.map(file));
  $("no-files").hidden = files.length > 0;
  $("batches").replaceChildren(...batches.map(batch));
  $("no-batches").hidden = batches.length > 0;
  const chosen = $("input-file").value;
  const inputs = files.filter(({ purpose }) => purpose === "batch");
  $("input-file").replaceChildren(...inputs.map(({ id, filename }) => element("option", { value: id, textContent: filename })));
  if (inputs.some(({ id }) => id === chosen)) $("input-file").value = chosen;
  $("start").disabled = inputs.length === 0;
}

async function show() {
  try {
    const [{ data: files }, { data: batches }] = await Promise.all([get("/v1/files?limit=200"), get("/v1/batches?limit=50")]);
    $("status").textContent = "";
    // What is under the fingers is only made anew where something changed.
    const now = JSON.stringify([files, batches]);
    if (now !== seen) put(files, batches);
    seen = now;
    if (isAway) $("page-error").textContent = "";
    isAway = false;
  } catch (error) {
    isAway = true;
    $("page-error").textContent = error.message;
  }
}

$("upload").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt("upload-error", async () => {
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", $("file").files[0]);
    const { id } = await send("/v1/files", form);
    $("upload").reset();
    await show();
    $("input-file").value = id;
  });
});

$("begin").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt("begin-error", () => send("/v1/batches", {
    input_file_id: $("input-file").value, endpoint: $("route").value, completion_window: $("window").value,
  }));
});

document.querySelector("nav a[data-view=files]").setAttribute("aria-current", "page");
for (;;) {
  if (!document.hidden) await show();
  await new Promise((resolve) => setTimeout(resolve, 2000));
}
