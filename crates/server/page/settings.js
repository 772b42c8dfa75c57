// The parameters: kept in this browser, saved as presets, and judged before anything is sent.
import { $, element } from "./dom.js";

const TEXTS = ["system", "stops", "schema", "offered"];
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "max_tokens",
  "thinking_budget",
];
const CHECKS = ["probabilities", "structured", "offers"];
const FIELDS = [...TEXTS, ...NUMBERS];
// Alternatives that are asked for each token.
const ALTERNATIVES = 5;

// The first two are there for everybody; they only change what they name.
const GIVEN = {
  "Exact (greedy)": { temperature: "0", top_p: "1" },
  "Inventive": { temperature: "1", top_p: "0.98", min_p: "0.02" },
};

const values = () => ({
  ...Object.fromEntries(FIELDS.map((id) => [id, $(id).value])),
  ...Object.fromEntries(CHECKS.map((id) => [id, $(id).checked])),
});
const initial = values();

function read(name) {
  try {
    const found = JSON.parse(localStorage.getItem(name) ?? "{}");
    return typeof found === "object" && found !== null ? found : {};
  } catch {
    return {};
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch { /* A browser that keeps nothing: they last as long as the page. */ }
}

function put(given) {
  for (const id of FIELDS) if (typeof given[id] === "string") $(id).value = given[id];
  for (const id of CHECKS) if (typeof given[id] === "boolean") $(id).checked = given[id];
  show();
}

let presets = read("presets");
put(read("parameters"));

function listPresets(chosen = "") {
  const group = (label, names) => {
    const node = element("optgroup", { label }, ...names.map((name) => element("option", { value: name, textContent: name })));
    return names.length > 0 ? [node] : [];
  };
  $("preset").replaceChildren(element("option", { value: "", textContent: "choose one" }),
    ...group("Given", Object.keys(GIVEN)), ...group("Yours", Object.keys(presets).sort()));
  $("preset").value = chosen;
  $("delete-preset").disabled = !(chosen in presets);
}
listPresets();

// What is wrong with a field of JSON, said under it.
function judged(box, field) {
  const problem = $(box).checked ? wrong(field) : "";
  $(`${field}-error`).textContent = problem;
  $(field).setAttribute("aria-invalid", problem !== "");
  return problem;
}

function wrong(field) {
  const name = field === "schema" ? "The schema is" : "The tools are";
  try {
    const value = JSON.parse($(field).value);
    if (field === "offered" && !Array.isArray(value)) return "The tools are no list.";
    if (field === "schema" && (typeof value !== "object" || value === null) && typeof value !== "boolean") return "The schema is no object.";
    return "";
  } catch (error) {
    return `${name} no JSON: ${error.message}`;
  }
}

function show() {
  $("schema-part").hidden = !$("structured").checked;
  $("offered-part").hidden = !$("offers").checked;
  judged("structured", "schema");
  judged("offers", "offered");
  // What changes an answer and may be out of sight.
  const modes = [["structured", "JSON"], ["offers", "tools"], ["probabilities", "probabilities"]].filter(([id]) => $(id).checked).map(([, word]) => word);
  if ($("system").value.trim()) modes.unshift("system message");
  $("modes").replaceChildren(...modes.map((word) => element("span", { className: "mode", textContent: word })));
}

$("parameters").addEventListener("submit", (event) => event.preventDefault());
$("parameters").addEventListener("input", (event) => {
  if (event.target.id === "preset" || event.target.id === "preset-name") return;
  show();
  write("parameters", values());
});
$("preset").addEventListener("change", () => {
  const chosen = $("preset").value;
  if (chosen) put(presets[chosen] ?? GIVEN[chosen]);
  $("delete-preset").disabled = !(chosen in presets);
  write("parameters", values());
});
$("save-preset").addEventListener("click", () => {
  $("name-preset").hidden = false;
  $("preset-name").value = $("preset").value in presets ? $("preset").value : "";
  $("preset-name").focus();
});
function keepPreset() {
  const name = $("preset-name").value.trim();
  if (name === "" || name in GIVEN) return $("preset-name").focus();
  presets = { ...presets, [name]: values() };
  write("presets", presets);
  $("name-preset").hidden = true;
  listPresets(name);
  $("preset").focus();
}
$("keep-preset").addEventListener("click", keepPreset);
$("preset-name").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  keepPreset();
});
$("delete-preset").addEventListener("click", () => {
  const { [$("preset").value]: _, ...others } = presets;
  presets = others;
  write("presets", presets);
  listPresets();
});
$("reset").addEventListener("click", () => {
  put(initial);
  listPresets();
  write("parameters", values());
});

// On a phone the drawer lies over the conversation.
export function openSettings(isOpen) {
  $("parameters").hidden = !isOpen;
  $("show-settings").setAttribute("aria-expanded", isOpen);
  if (isOpen) $("preset").focus();
  else $("show-settings").focus();
}
$("show-settings").addEventListener("click", () => openSettings($("parameters").hidden));
$("hide-settings").addEventListener("click", () => openSettings(false));

// What is wrong, with the field that it is wrong in; nothing is sent then.
export function problem() {
  for (const [box, field] of [["structured", "schema"], ["offers", "offered"]]) {
    const said = judged(box, field);
    if (said) return { said, field };
  }
  for (const id of NUMBERS) {
    if (!$(id).validity.valid) return { said: `${$(id).labels[0].textContent.trim()}: ${$(id).validationMessage}`, field: id };
  }
  return null;
}

const number = (id) => ($(id).value.trim() === "" ? undefined : Number($(id).value));

export const isStructured = () => $("structured").checked;
export const system = () => $("system").value.trim();

// The parameters as the API has them. They were judged before.
export function parameters() {
  const asked = Object.fromEntries(NUMBERS.map((id) => [id, number(id)]));
  const stops = $("stops").value.split("\n").filter((line) => line !== "");
  if (stops.length > 0) asked.stop = stops;
  if ($("probabilities").checked) Object.assign(asked, { logprobs: true, top_logprobs: ALTERNATIVES });
  if ($("structured").checked) {
    asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse($("schema").value), strict: true } };
  }
  if ($("offers").checked) asked.tools = JSON.parse($("offered").value);
  return asked;
}
