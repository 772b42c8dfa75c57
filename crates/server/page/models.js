// Which model answers: chosen, loaded, unloaded, and fetched where the server can do that.
import { $, amount, button, count, element, row } from "./dom.js";
import { get, lines, send } from "./api.js";

let known = [];
let details = new Map();
let canPull = null;
let pulling = null;

// What is known of the chosen model: {id, state, max_model_len}.
export const chosen = () => known.find(({ id }) => id === $("model").value) ?? known[0] ?? null;
export const models = () => known;

// Reads them anew, and keeps the choice.
export async function listModels() {
  const { data } = await get("/v1/models");
  known = data;
  const wanted = $("model").value || localStorage.getItem("model");
  const words = data.map(({ id, state }) => [id, state === "loaded" || data.length === 1 ? id : `${id} (${state})`]);
  const there = [...$("model").options].map((option) => [option.value, option.textContent]);
  if (JSON.stringify(words) !== JSON.stringify(there)) {
    $("model").replaceChildren(...words.map(([value, textContent]) => element("option", { value, textContent })));
    if (data.some(({ id }) => id === wanted)) $("model").value = wanted;
  }
  document.dispatchEvent(new Event("model"));
}

$("model").addEventListener("change", () => {
  localStorage.setItem("model", $("model").value);
  document.dispatchEvent(new Event("model"));
});

async function describe() {
  await listModels();
  try {
    const { models: tags } = await get("/api/tags");
    details = new Map(tags.map((tag) => [tag.name, tag]));
  } catch { /* Only words beside the names. */ }
  if (canPull === null) {
    try {
      const { paths } = await get("/openapi.json");
      canPull = Boolean(paths["/api/pull"]?.post);
    } catch {
      canPull = null;
    }
  }
  $("pull-form").hidden = !canPull;
}

function draw() {
  $("models-list").replaceChildren(...known.map((model) => {
    const { id, state, parent } = model;
    const tag = details.get(id);
    const weights = parent ? `adapter of ${parent}` : [tag?.details.parameter_size, tag?.details.quantization_level, tag?.size > 0 ? amount(tag.size) : ""].filter(Boolean).join(", ");
    const act = state === "loaded"
      ? button("Unload", (event) => change(event, id, 0), { className: "small", "aria-label": `Unload ${id}` })
      : button("Load", (event) => change(event, id), { className: "small", disabled: state === "loading" || state === "unloading", "aria-label": `Load ${id}` });
    return row([id, weights, [count(model.max_model_len), "number"], state, parent ? "" : act]);
  }));
}

// A request without a prompt loads a model; one that is kept for no time unloads it.
async function change(event, model, keepAlive) {
  const pressed = event.currentTarget;
  pressed.disabled = true;
  pressed.textContent = keepAlive === 0 ? "Unloading" : "Loading";
  $("models-error").textContent = "";
  try {
    await send("/api/generate", { model, stream: false, ...(keepAlive === undefined ? {} : { keep_alive: keepAlive }) });
    // It goes when the last request has left it.
    for (let look = 0; look < 20; look += 1) {
      await listModels();
      const { state } = known.find(({ id }) => id === model) ?? {};
      if (state === (keepAlive === 0 ? "unloaded" : "loaded")) break;
      await new Promise((resolve) => setTimeout(resolve, 250));
    }
  } catch (error) {
    $("models-error").textContent = error.message;
  }
  draw();
  if (!document.activeElement || document.activeElement === document.body) $("hide-models").focus();
}

async function pull(event) {
  event.preventDefault();
  const model = $("pull-name").value.trim();
  if (model === "" || pulling) return;
  pulling = new AbortController();
  $("pull").disabled = true;
  $("pull-stop").hidden = false;
  $("models-error").textContent = "";
  $("pull-words").textContent = `Fetching ${model}`;
  try {
    for await (const { status, error, completed, total } of lines("/api/pull", { model, stream: true }, pulling.signal)) {
      if (error) throw new Error(error);
      $("pull-bar").hidden = !(total > 0);
      if (total > 0) Object.assign($("pull-bar"), { max: total, value: completed ?? 0 });
      $("pull-words").textContent = total > 0 ? `${status}: ${amount(completed ?? 0)} of ${amount(total)}` : status ?? "";
    }
    await describe();
    draw();
    $("pull-name").value = "";
  } catch (error) {
    $("pull-words").textContent = error.name === "AbortError" ? "Stopped; what was fetched is kept." : "";
    if (error.name !== "AbortError") $("models-error").textContent = error.message;
  }
  pulling = null;
  $("pull").disabled = false;
  $("pull-stop").hidden = true;
  $("pull-bar").hidden = true;
}

$("show-models").addEventListener("click", async () => {
  $("models-error").textContent = "";
  $("models-dialog").showModal();
  try {
    await describe();
  } catch (error) {
    $("models-error").textContent = error.message;
  }
  draw();
});
$("hide-models").addEventListener("click", () => $("models-dialog").close());
$("pull-form").addEventListener("submit", pull);
$("pull-stop").addEventListener("click", () => pulling?.abort());
