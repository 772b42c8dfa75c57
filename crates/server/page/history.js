// The list of conversations: search, names, export and import.
import { $, download, element, iconButton, say } from "./dom.js";
import * as store from "./store.js";

let acts = null;
let known = [];

const DAY = 86_400_000;

function age(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "This week";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}

// Every word that is looked for is somewhere in it.
function found(conversation, words) {
  if (words.length === 0) return true;
  const whole = [store.title(conversation), ...Object.values(conversation.turns).map((turn) => turn.text)].join("\n").toLowerCase();
  return words.every((word) => whole.includes(word));
}

function line(conversation) {
  const name = store.title(conversation);
  const isOpen = conversation.id === acts.current().id;
  const open = element("button", { type: "button", className: "open", textContent: name, title: name, dir: "auto", onclick: () => acts.open(conversation.id) });
  if (isOpen) open.setAttribute("aria-current", "true");
  const item = element("li", { className: isOpen ? "chosen" : "" }, open);
  const rename = () => {
    const field = element("input", { value: name, maxLength: 200, "aria-label": "Name of the conversation", dir: "auto" });
    let isDone = false;
    const done = async (save) => {
      if (isDone) return;
      isDone = true;
      if (save) await acts.change(conversation.id, (one) => Object.assign(one, { title: field.value.trim(), named: field.value.trim() !== "" }));
      await list();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") done(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        done(false);
      }
    });
    field.addEventListener("blur", () => done(true));
    item.replaceChildren(field);
    field.select();
  };
  item.append(element("span", { className: "acts" },
    iconButton("rename", `Rename ${name}`, rename),
    iconButton("save", `Export ${name}`, () => save([conversation])),
    iconButton("remove", `Delete ${name}`, () => remove(conversation))));
  return item;
}

async function remove(conversation) {
  await acts.remove(conversation.id);
  await list();
  say("The conversation is deleted.", async () => {
    await store.keep(conversation);
    await list();
  });
}

const stamp = () => new Date().toISOString().slice(0, 10);

async function save(conversations) {
  const one = conversations.length === 1 ? conversations[0] : null;
  // One conversation can also be read by `/load` in the terminal.
  const text = store.exported(conversations, one ? acts.messages(one) : null);
  const name = one ? store.title(one).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 40) || "chat" : "conversations";
  download(`fornax-${name}-${stamp()}.json`, text, "application/json");
}

export async function list() {
  known = await store.all();
  const words = $("search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const shown = known.filter((conversation) => found(conversation, words));
  const nodes = [];
  let group = null;
  for (const conversation of shown) {
    const when = age(conversation.updated);
    if (when !== group) {
      group = when;
      nodes.push(element("li", { className: "when", textContent: when }));
    }
    nodes.push(line(conversation));
  }
  $("conversations").replaceChildren(...nodes);
  const isKept = await store.isKept();
  $("no-conversations").hidden = shown.length > 0;
  $("no-conversations").textContent = !isKept ? "This browser keeps nothing: conversations last as long as this page."
    : words.length > 0 ? "Nothing was found." : "Conversations are kept in this browser and nowhere else.";
  $("export").disabled = known.length === 0;
  $("forget").disabled = known.length === 0;
}

export function start(given) {
  acts = given;
  $("search").addEventListener("input", list);
  $("new").addEventListener("click", () => acts.begin());
  $("export").addEventListener("click", () => save(known));
  $("forget").addEventListener("click", async () => {
    const all = await store.all();
    await acts.removeAll();
    await list();
    say(`${all.length} conversations are deleted.`, async () => {
      for (const conversation of all) await store.keep(conversation);
      await list();
    });
  });
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", async () => {
    for (const file of $("import-file").files) {
      try {
        const conversations = store.imported(await file.text());
        for (const conversation of conversations) await store.keep(conversation);
        say(conversations.length === 1 ? "One conversation was imported." : `${conversations.length} conversations were imported.`);
      } catch (error) {
        acts.complain(`${file.name}: ${error.message}`);
      }
    }
    $("import-file").value = "";
    await list();
  });
  return list();
}
